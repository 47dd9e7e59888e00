"""Saves the state of a run, and restores it: to resume, to roll back, or to continue a run of Lightning."""
