"""Prepares a run for its first batch: callbacks, ranks, loaders and limits, and the checks on them."""
