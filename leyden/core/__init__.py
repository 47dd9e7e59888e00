"""What every package needs, and what depends on none: errors, trees of tensors, text, paths, devices, ranks."""
