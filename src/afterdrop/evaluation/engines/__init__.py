"""Engines: how the samples of a batch are computed."""
