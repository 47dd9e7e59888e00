"""What the user's own training loop needs beside the engine: its settings, loaders, trackers, checkpoints and ranks."""
