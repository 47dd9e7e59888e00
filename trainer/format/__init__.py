"""The file formats of a checkpoint: encodings, tensors, files and their manifest. Nothing here knows ranks or a
Trainer.
"""
