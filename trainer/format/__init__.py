"""The bytes of a checkpoint: encodings, tensors, files and their manifest. Knows neither ranks nor the Trainer."""
