"""What a loop of one's own needs beside the engine: its settings, loaders, trackers, checkpoints and ranks."""
