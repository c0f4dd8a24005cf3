"""The cell before its first step: parameters, optimizer state, set-up, loading, the rounding of blocks.

In: a spec and its architecture. Out: tensors and their bytes. No torch here.
"""
