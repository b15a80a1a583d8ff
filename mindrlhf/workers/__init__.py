"""Processes apart from the training for functions of the user."""
