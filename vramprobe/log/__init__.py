"""The log: what a run asked of the allocator, in order, and its exact extension to a deeper model.

In: events of an allocator with marks of phases and layers, from any source that records them. Out: a Log; or, from the
logs of three shallow models, the Log of the whole one. No torch, no device; it never decides what a card holds
(allocator/ replays).
"""
