"""The memory model: arithmetic's terms with coefficients learnt from records, and how far it may be off.

In: rows of records and the terms of their cells. Out: a MemoryModel with intervals, saved as JSON. It stays this side
of the torch line, is where the two sides of the independence line meet, as numbers, and never predicts (predict/ does).
"""
