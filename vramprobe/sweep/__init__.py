"""Sweeps: a YAML file becomes cells, the cells a plan, the plan runs that a journal keeps.

In: a sweep's definition, the records there are, a card, limits. Out: a plan with seconds and dollars, then records,
each synced as it ends. The runner is this side of the process line: it starts workers and hears of them through JSON
alone. It stays this side of the torch line, too.
"""
