"""Predictions for tests of what is made of them: their bytes are the test's own.

In: fields that a test wants to differ. Out: a Prediction of a shipped recipe's cell with these.
"""

from functools import cache
from typing import Any

from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predicted
from vramprobe.resolve import resolve


@cache
def _shipped() -> Prediction:
    spec = resolve(model="llama-3.2-1b", method="lora", device="cuda", batch_size=2, seq_len=1024)
    return predicted(spec, gpu=None, records=False)


def some_prediction(**update: Any) -> Prediction:
    """A prediction on one GPU with these fields; device memory is not known."""
    return _shipped().model_copy(update={"device_bytes": None} | update)
