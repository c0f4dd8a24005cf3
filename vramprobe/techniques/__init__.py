"""Techniques that save memory: a registry of them, what each saved in an emulated run, and which pays for a cell.

In: data/techniques.toml (one table each) and data/techniques.csv (what the runs of benchmarks/techniques/ gave).
Out: frozen rows, and a ranking of those that arithmetic knows for one cell. Runs nothing, imports no torch.
"""
