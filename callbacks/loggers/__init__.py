"""Loggers to files and to tracking services."""
