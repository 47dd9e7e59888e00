"""Checkpoints on disk: folders of safetensors and JSON, complete or absent, verified when read, without pickles.

- `writer.py` and `reader.py` write and read a checkpoint. `saves.py` and `copies.py` write it while training
  continues. `leyden/checkpoint/format` has the file formats.
- `shard_plan.py` plans which rank writes which part of a sharded tensor; `shards.py` reads and writes the parts.
  `checkpoint_ranks.py` and `nodes.py` coordinate processes and machines.
- `owners.py` is the interface by which the parts of a run save, validate and load their state. `step_states.py` does
  this for optimizers and schedulers, and `optimizers.py` keys optimizer state by parameter name.
  `trainer/saved/saving.py` and `leyden/accelerator/records/saving.py` list the parts.
- `folder.py` finds the newest checkpoint in a folder, and `lock.py` keeps a second run out of it.
- `merge.py` writes files for other tools. `foreign.py` and `hugging_face.py` read theirs.
"""
