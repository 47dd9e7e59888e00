"""What a custom training loop writes and reads back: checkpoints, exported weights, trackers."""
