"""What sharding strategies are made of: which modules form a group, how a model comes to its shards, and old names."""
