"""Loaders that can be resumed and combined, random numbers, and limits on the number of batches.

`cursor.py` reads a training loader and knows its place; `sources.py` does this for each kind of loader. On several ranks `sharding.py`
shares out an order of samples, and `streams.py` loaders without one. `rng.py` has every generator's state, `seek.py` samplers that
start in the middle of their epoch.
"""
