"""Predictions: a cell on one GPU or several, a grid of a million, the inverse questions, and how far off they are.

In: a cell, a MemoryModel or none. Out: Predictions with an interval, their terms and a verdict for a GPU. predict.py
has the one function; ranks.py, tensor_parallel.py and device_map.py count several GPUs for it; questions.py and
what_fits.py take a user's words. Nothing here loads torch.
"""
