"""Replace missing weights, tokenizers and rows by dummies, in the processes of a profiled command.

In: VRAMPROBE_PROFILE, a run's folder whose ``run.json`` asks for it (stand_ins.py). Out: ``hub/`` in it, repositories
as the hub's cache has them, and the file ``replaced``, a line for each thing that was replaced. Nothing where it is not
asked for. Loaded into other people's environments as the hook is: the standard library, and of torch, transformers and
datasets what the command itself has loaded.
"""
