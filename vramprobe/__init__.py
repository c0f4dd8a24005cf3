"""vramprobe: how much GPU memory does this fine-tuning run need, and why?

One call per stage is in :mod:`vramprobe.api`; the command line is ``vramprobe --help``. Each folder is a room on the
data's way, and says in its first lines what comes in and what goes out. Three lines nobody crosses, and a test says so:
the torch line (only workload/, simulate/ and parts of measure/ load torch; importing this does not), the process line
(runner and worker exchange a spec and a record as JSON, nothing else), the independence line (terms/, arithmetic, and
workload/, tensors, never import each other: a shared helper would let errors cancel).
"""

__version__ = "0.1.0"


def load_ipython_extension(shell):
    """``%load_ext vramprobe`` in a notebook: its kernel is profiled from now on, and ``%vramprobe`` shows it so far."""
    from vramprobe.cli.notebook import load

    load(shell)
