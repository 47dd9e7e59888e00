"""DeepSpeed's ZeRO: the strategy, its config, its engine, and its state."""
