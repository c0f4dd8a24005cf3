"""ZeRO-1 and ZeRO-2, DeepSpeed's: weights are whole; the optimizer's fp32 weights and state are sharded.

In: a spec with its ranks. Out: the course of a rank, and its requests to an allocator. No torch here.
"""
