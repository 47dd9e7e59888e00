"""Runs from a configuration: `leyden fit`, `validate`, `test`, `predict`, and `LeydenCLI`."""
