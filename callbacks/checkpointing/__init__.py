"""Callbacks that decide when to save checkpoints, how to name them, and which ones to keep."""
