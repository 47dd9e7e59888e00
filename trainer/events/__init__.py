"""What happens in a run, which everybody may name: hooks, progress, signals, and the stage that is under way."""
