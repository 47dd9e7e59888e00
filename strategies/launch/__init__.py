"""How ranks are started, and how a process knows which one it is.

A script becomes the agent of its ranks (`script.py`, by torch's elastic engine in `elastic.py`); a function is spawned
or forked (`functions.py`, `xla.py`). `environment.py` reads which rank a process is, `failure.py` ends all ranks when
one fails.
"""
