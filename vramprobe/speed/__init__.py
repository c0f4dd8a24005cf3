"""Speed: a counted step and a card -> seconds of a training step and tokens per second, by a fitted roofline.

In: the launches of one step, a GPU of the catalog, how many of them and how they share the states. Out: an Estimate
with an interval. How much of a data sheet's rate a step reaches is fitted to counted published steps by
benchmarks/speed/rates_fit.py and ships as numbers (data/rates/counted.json). No torch, no scipy.
"""
