"""What the user's own training loop needs beside the engine: its settings, loaders, trackers, checkpoints and ranks.

`trainer/accelerator.py` puts these together. `plugins.py` and `options.py` are its arguments, `preparing.py` is `prepare`, `stepping.py`
the step, `loader.py` the loaders, `collectives.py` and `ranks.py` what ranks exchange, `state.py` saves and loads.
"""
