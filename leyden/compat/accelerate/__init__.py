"""What exists because Accelerate does: its checkpoints, its service trackers, the names that Leyden lacks."""
