"""Recipes: a cell recorded on shallow models of its architecture, and the whole model's log made from that.

In: a CellSpec and an NVIDIA GPU. Out: a Recipe, kept in the user's cache; from it the Log of the cell at its own depth
and its peaks in every tier. It records on an emulated GPU, in processes of their own; nothing here imports torch.
"""
