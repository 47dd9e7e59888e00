"""The checkpoint on disk: a folder of safetensors and JSON, complete or absent, verified when read, without a pickle.

`run.py` says what a checkpoint holds of a run; `writer.py` and `reader.py` write and read it. Below them: `manifest.py` (checksums),
`safefile.py` (the bytes of safetensors), `codec.py` (state as JSON), `tensors.py` (tensors of every kind), `shards.py` and `sharded.py`
(tensors in parts), `ranks.py` and `nodes.py` (several processes and machines), `staging.py` (temporary folders), `folder.py` (which
is the last one). `merge.py` and `foreign.py` are for the files of others.
"""
