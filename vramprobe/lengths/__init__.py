"""A data set's lengths: which batches a sampler makes of them, and what those batches mean for memory.

In: lengths in tokens (a file, a histogram or quantiles) and a cell. Out: the worst batch, peaks by quantile of the
batches, padding, what fits a GPU, and reserved memory over many steps. Never reads text or tokenizes; imports no torch.
"""
