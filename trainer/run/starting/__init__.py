"""What a run needs before its first batch: callbacks, ranks, loaders, limits, and their checks."""
