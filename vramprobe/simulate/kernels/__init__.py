"""Kernels: which one a device would run, and what it allocates while it runs.

In: an operator, its arguments, the chip. Out: sizes in bytes. Loads torch.
"""
