"""One run, from its arguments to its tear-down: who takes part, and how it starts, resumes, is saved and ends."""
