"""Sound for rows: silence of any length as one WAV file, read back without the decoder that datasets would need.

In: seconds. Out: a file, its path, and what datasets' Audio makes of it. Of other files the library's own decoder says
what is missing. The standard library alone; numpy where a row is read.
"""

import functools
import os
import wave

_RATE = 16_000  # a second, as speech models take it


def silence(folder, seconds):
    """The path of a file of 16 bits, one channel; the same for all processes of a run."""
    path = os.path.join(folder, f"silence-{seconds:g}s.wav")
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}"
        with wave.open(own, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(_RATE)
            out.writeframes(bytes(2 * round(_RATE * seconds)))
        os.replace(own, path)
    return path


def serve(module, *, folder, replacements):
    """datasets.features.audio: rows of silence are read here where torchcodec is missing."""
    plain = module.Audio.decode_example

    @functools.wraps(plain)
    def decode_example(self, value, *words, **options):
        try:
            return plain(self, value, *words, **options)
        except ImportError:
            path = value.get("path") or ""
            if os.path.dirname(path) != folder:
                raise
        replacements.replaced("audio decoder", "datasets", "none is needed for silence; real files need torchcodec")
        return _read(path, self.sampling_rate)

    module.Audio.decode_example = decode_example


def _read(path, rate):
    import numpy

    with wave.open(path, "rb") as file:
        seconds = file.getnframes() / file.getframerate()
    rate = rate or _RATE
    return {"path": path, "array": numpy.zeros(round(seconds * rate), dtype=numpy.float32), "sampling_rate": rate}
