"""The same step with no GPU: fake tensors for what is alive, a replay of the caching allocator for what is reserved.

In: a CellSpec, and a card of the catalog or none. Out: a Simulation: a record that says ``simulated``, and every
allocation and free in order. It runs the workload, so it is on the far side of the torch line (``replay`` and
``against_snapshot`` alone need no torch), and this side of the independence line: it never asks terms/. It predicts and
never measures.
"""
