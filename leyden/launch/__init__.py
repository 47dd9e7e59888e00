"""Starts ranks, and finds out which rank a process is.

A script becomes the agent of its ranks (`script.py`, through torch's elastic engine in `elastic.py`). A function is
spawned or forked (`functions.py`, `xla.py`). `leyden/core/environment.py` reads the rank of a process, and `failure.py`
ends all ranks when one fails.
"""
