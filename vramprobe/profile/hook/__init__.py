"""The hook: what every process of a profiled command loads when it imports torch.

In: VRAMPROBE_PROFILE, a run's folder with ``run.json``. Out: ``<pid>.jsonl`` and ``<pid>.history`` in it (raw.py reads
them). Nothing without the variable. This package is loaded into other people's environments: the standard library and
torch, nothing of the rest of vramprobe; and it never ends a process but where the run was asked to stop.
"""
