"""What a run says of itself: to loggers, on the terminal, and in the notes of an error."""
