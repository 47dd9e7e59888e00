"""Fully sharded data parallelism: FSDPStrategy and its parts."""
