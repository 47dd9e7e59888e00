"""Fully sharded data parallelism: the strategy, and what it is made of."""
