"""DeepSpeed's ZeRO: its config, its engine, and its conflicts with what a run asks for."""
