"""WHAT runs: real models, adapters, optimizers, one training step in phases; the same code under every instrument.

In: a CellSpec. Out: a model, its optimizer and a step that calls back at each phase. On the far side of the torch line;
it never observes memory (measure/ does).
"""
