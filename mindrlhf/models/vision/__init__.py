"""Vision tower, order and places of its patches, and positions of image tokens.

`windows` and `positions` are whole numbers and angles in NumPy, for arrays that graphs take; `tower` has the graph.
"""
