"""Mask draws and dropout sites of any module."""
