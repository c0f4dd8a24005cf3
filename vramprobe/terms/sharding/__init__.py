"""Sharding: what one rank of several holds and allocates, by kind of sharding.

In: a spec with its ranks. Out: the rank's moments, or its requests to an allocator. No torch here.
"""
