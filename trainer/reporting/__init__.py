"""What a run reports to loggers, on the terminal, and in the notes of an error."""
