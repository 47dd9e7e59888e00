"""The custom training loop at work: windows, steps, collectives, checks and the loop's end."""
