"""Acceptance of a device: operators, layers, models, steps and runs against float64 answers.

`mindrlhf acceptance` runs it. Every difference is a row of one report; nothing stops at the first.
"""
