"""The same step with no GPU: fake tensors for what is alive, a replay of the caching allocator for what is reserved.

It predicts, never measures. ``run`` is the way in; ``replay`` and ``against_snapshot`` need no torch.
"""
