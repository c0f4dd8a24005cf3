"""vramprobe: how much GPU memory does this fine-tuning run need, and why?

One call per stage is in :mod:`vramprobe.api`; the command line is ``vramprobe --help``. Importing this loads no torch.
"""

__version__ = "0.1.0"
