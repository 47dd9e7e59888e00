"""Searches before a run for a learning rate or the largest batch that fits. They have no side effects on the run."""
