"""Longest waits for other ranks, in seconds.

Imports nothing: the C++ operators and the settings read them too.
"""

# A wait for a message gives up after this time: a rank may compile, score or save for long, but none waits for ever.
MESSAGE_LIMIT_S = 7200
RANK_TIMEOUT_S = 600.0  # limit for a rank that stands still: the default of `trainer.rank_timeout_s`
