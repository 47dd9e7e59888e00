"""Checkpoints on disk: folders of safetensors and JSON, complete or absent, verified when read, without pickles.

`writer.py` and `reader.py` write and read a checkpoint, `shards.py` plans sharded tensors, and `ranks.py` and
`nodes.py` coordinate processes and machines. `folder.py` finds the newest checkpoint in a folder, `optimizers.py` keys
optimizer state by parameter name. `merge.py` and `foreign.py`
serve other tools. The file formats are in `trainer/format`; `trainer/run/saving.py` says what a checkpoint holds of a
run.
"""
