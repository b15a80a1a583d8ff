"""Training from Python, in the form that TRL's users know.

It makes flags and settings of what it is given, and calls the same functions as the commands.
"""
