"""Context parallelism: each rank of a group runs the model on a part of every sequence."""
