"""When checkpoints are saved, how they are named, and which ones are kept."""
