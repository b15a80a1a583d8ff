"""Processes, separate from the training, for the user's functions."""
