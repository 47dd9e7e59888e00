"""Checkpoints on disk: folders of safetensors and JSON, complete or absent, verified when read, without pickles.

`owners.py` says how the parts of a run give their state, check it and take it back; `step_states.py` does so for
optimizers and schedulers. `trainer/run/saved/saving.py` and `trainer/accelerator/records/saving.py` name the parts.
`writer.py` and `reader.py` write and read a checkpoint, `shards.py` plans sharded tensors, and `checkpoint_ranks.py`
and `nodes.py` coordinate processes and machines. `folder.py` finds the newest checkpoint in a folder, `optimizers.py`
keys optimizer state by parameter name. `merge.py` and `foreign.py` serve other tools. The file formats are in
`trainer/format`.
"""
