"""The `Accelerator` and its parts: a training loop of the user's own, with the names of Hugging Face Accelerate."""
