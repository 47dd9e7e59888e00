"""The loops of a run: fit, evaluation, prediction, and the optimisation step between them."""
