"""Loaders that can be resumed, combined and sharded, random numbers, and limits on the number of batches.

`cursor.py` reads a training loader and tracks its position; `sources.py` does so for each kind of loader. On several
ranks `sharding.py` shards an order of samples, and `streams.py` shards loaders without an index. `rng.py` saves and
restores every generator, and `seek.py` starts samplers in the middle of their epoch.
"""
