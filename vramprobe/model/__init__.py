"""The memory model: arithmetic's terms with coefficients learnt from records, and how far it may be off.

In: rows of records and the terms of their cells. Out: a MemoryModel with intervals, saved as JSON. It never imports
torch, and never predicts (predict/ does).
"""
