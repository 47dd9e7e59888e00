"""Pipeline parallelism: a model cut into stages, each on its own ranks, through which micro-batches pass."""
