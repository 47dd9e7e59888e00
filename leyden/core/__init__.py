"""What every room needs, and what knows no room: errors, trees of tensors, text, paths, devices, ranks."""
