"""Predictions: a cell on one GPU or several, the inverse questions, and how far off they are.

In: a cell, a CardFit or none. Out: Predictions with an interval, their terms and a verdict for a GPU. predict.py
has the one function; ranks.py and device_map.py count several GPUs for it; questions.py and
what_fits.py take a user's words. Nothing here loads torch.
"""
