"""Figures and the HTML page of runs: pure functions of Scores and of a run's folder."""
