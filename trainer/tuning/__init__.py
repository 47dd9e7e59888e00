"""Searches before a run: the learning rate, and the largest batch that fits. They leave no trace in what they try."""
