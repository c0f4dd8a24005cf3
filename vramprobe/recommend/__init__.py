"""Recommend: a model, a method, a length and an amount of data -> which cards, how many, how long, how much money.

In: a cell's words, tokens, a deadline, a budget, prices. Out: a Recommendation: what fits at which settings, how fast
by an estimate with an interval, what it costs by dated offers, and why not the others. It stays this side of the torch
line and loads neither numpy nor scipy.
"""
