"""Evaluating models: Scores of every member of the family."""
