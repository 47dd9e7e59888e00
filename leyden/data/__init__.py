"""Resumes, combines and shards loaders, limits their number of batches, and manages random generators.

`cursor.py` reads a training loader and tracks its position, with the source in `sources.py` for each kind of loader. On
several ranks, `sharding.py` shards an order of samples, and `streams.py` shards loaders that cannot be indexed.
`rng.py` saves and restores all random generators, and `seek.py` starts samplers in the middle of their epoch.
"""
