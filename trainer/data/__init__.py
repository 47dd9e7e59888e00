"""Loaders that can be resumed and combined, random numbers, and limits on the number of batches."""
