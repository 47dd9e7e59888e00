"""The loops of a run: fit, evaluation and prediction, and the optimization step."""
