"""ZeRO-3, DeepSpeed's: weights, gradients and optimizer state are sharded; a module's weights are gathered for it.

In: a spec with its ranks. Out: the course of a rank, and its requests to an allocator. No torch here.
"""
