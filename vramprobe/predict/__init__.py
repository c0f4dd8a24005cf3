"""Predictions: one cell, a grid of a million, the inverse questions, one rank of several, and how far off they are.

In: a cell, a MemoryModel or none. Out: Predictions with an interval, their terms and a verdict for a card. It stays
this side of the torch line; trace_engine.py alone crosses it, for it starts the simulation, and only when it is called.
"""
