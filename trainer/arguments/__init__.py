"""The Trainer's arguments: defaults, allowed values, which ones were given, and what a preemption and a replay set."""
