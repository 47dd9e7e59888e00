"""Pipeline parallelism: a model is split into stages on different ranks, and micro-batches flow through them."""
