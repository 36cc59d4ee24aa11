"""Adapters to other frameworks, each imported on use."""
