"""Speed: a cell and a card -> seconds of a training step and tokens per second, by arithmetic and a fitted roofline.

In: a CellSpec, a GPU of the catalog, how many of them and how they share the states. Out: an Estimate with an interval.
The work is counted (work.py); how much of a data sheet's rate a step reaches is fitted to published rows by
benchmarks/speed/rates_fit.py and ships as numbers (data/rates/speed.json). No torch, no scipy.
"""
