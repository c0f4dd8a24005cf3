"""Counts what one optimizer step asks of an emulated card: operators, FLOPs, bytes, launches, collectives, copies.

In: the watch over values, whose mode sees every operator, and the emulated driver's own counters. Out: one ``count``
line of the journal. It computes no time (vramprobe/speed/counted.py does), allocates nothing on the card, and runs on
the torch side of the torch line.
"""
