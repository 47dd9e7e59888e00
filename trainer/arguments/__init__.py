"""The Trainer's arguments: defaults, allowed values, the ones given by the user, and overrides of a replay."""
