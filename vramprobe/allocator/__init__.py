"""CUDA's caching allocator without CUDA.

In: requests, settings, the size of a device. Out: blocks, and allocated and reserved bytes. allocator has the rules,
config the settings, plain/ the same in C for the default settings; log/reserved.py plays a log. No torch here.
"""
