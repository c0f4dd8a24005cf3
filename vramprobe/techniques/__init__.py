"""Techniques that save memory: a registry of them, and what each saved in an emulated run.

In: data/techniques.toml (one table each) and data/techniques.csv (what the runs of benchmarks/techniques/ gave).
Out: frozen rows, and as changes of a cell those that predict knows. Runs nothing, imports no torch.
"""
