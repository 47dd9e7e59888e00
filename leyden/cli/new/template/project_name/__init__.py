"""Recognizes handwritten digits."""
