"""The fit: what a card adds to what is predicted of a cell, learnt from records alone.

In: records, and what is predicted of their cells (by whoever asks: predict/ lies above). Out: a CardFit, saved as JSON.
It never predicts and never imports torch or numpy.
"""
