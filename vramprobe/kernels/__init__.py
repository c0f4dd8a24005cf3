"""Which CUDA kernels torch runs on a GPU, and the workspaces that they allocate while they run.

In: a Chip and sizes. Out: a kernel's name, sizes in bytes. One table, from pytorch's sources (torch 2.13), which the
arithmetic (terms/) reads; emulated GPUs are the independent check. Pure arithmetic: never imports torch.
"""
