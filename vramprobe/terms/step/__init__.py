"""The step: a cell from load to zero_grad.

In: a spec. Out: the moments that can be its peak (walk), or its requests to an allocator (requests). No torch here.
"""
