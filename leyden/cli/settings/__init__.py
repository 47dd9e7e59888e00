"""The configuration file of a launch: its keys, reading and writing it, and `leyden config`, which asks for it."""
