"""The events of a run: hooks, progress, signals, preemption, and the current stage."""
