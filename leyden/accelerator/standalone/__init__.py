"""Accelerate's functions and classes that scripts use alongside the Accelerator."""
