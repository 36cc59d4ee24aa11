"""Scores to a member, and a member to a predictor."""
