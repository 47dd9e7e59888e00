"""Platforms that run training functions in processes of their own, such as Ray. Each has a module here."""
