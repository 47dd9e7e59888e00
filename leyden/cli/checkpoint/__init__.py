"""Commands that read checkpoints: `leyden checkpoint`, `merge`, `convert`, `bisect` and `replay`."""
