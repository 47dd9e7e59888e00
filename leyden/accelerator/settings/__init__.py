"""The settings of an Accelerator: its arguments, plugins and handlers."""
