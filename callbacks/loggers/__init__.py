"""Loggers: to files, and to services; what they write, and who writes it."""
