"""What sharding strategies are made of: which modules form a group, how a model is sharded, and the names of older options."""
