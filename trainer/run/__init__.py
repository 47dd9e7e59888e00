"""One run, from its arguments to its tear-down: what takes part in it, how its ranks start, how it is saved, resumed and ended."""
