"""Predictions: one cell, a grid of a million, the inverse questions, one rank of several, and how far off they are.

In: a cell, a MemoryModel or none. Out: Predictions with an interval, their terms and a verdict for a card. Importing it
loads no torch; trace_engine.py alone starts the simulation, which does, and only when it is called.
"""
