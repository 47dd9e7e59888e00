"""The `Accelerator` and its parts, for custom training loops, under Hugging Face Accelerate's names."""
