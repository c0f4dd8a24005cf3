"""The same workload on fake tensors: every allocation and free in order, no compute. It predicts, never measures."""
