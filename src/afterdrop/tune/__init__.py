"""Tuning: a batched Gaussian-process bandit over the hyperparameters of a recipe."""
