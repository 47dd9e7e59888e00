"""One run, from its arguments to its teardown: its parts, and how it starts, resumes, is saved and ends."""
