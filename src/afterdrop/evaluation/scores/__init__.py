"""Scores: the results of an evaluation, per target."""
