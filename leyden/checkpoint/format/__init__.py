"""The file formats of a checkpoint: encodings, tensors, files and their manifest.

Nothing in this package knows about ranks or a Trainer.
"""
