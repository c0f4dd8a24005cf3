"""The same step with no GPU: fake tensors for what is alive, a replay of the caching allocator for what is reserved."""
