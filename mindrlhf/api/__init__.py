"""Training from Python, in the form that TRL's users know.

It turns its arguments into flags and settings, and calls the same functions as the commands.
"""
