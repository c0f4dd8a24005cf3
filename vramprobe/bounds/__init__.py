"""Bounds: what a cell takes at least, by formulas alone: weights, gradients, optimizer state, logits.

In: a CellSpec and its Architecture. Out: the tensors of the prepared model, their bytes and a floor that no answer may
lie below. Never imports torch, and knows no order of requests: how much more a run takes is recorded.
"""
