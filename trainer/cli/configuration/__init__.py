"""Runs that a configuration describes: `leyden fit`, `validate`, `test`, `predict`, and `LeydenCLI`."""
