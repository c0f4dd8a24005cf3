"""Estimate the duration of a generation by transformers on an emulated card: token by token, each with all of Python's
work.

In: transformers' criterion of length, which it asks after each token. Out: as soon as the pace is known, where it would
take longer than a minute, a line on stderr, with how to shorten it, and a warning in the journal; then a line a minute.
Nothing is changed.
"""

import functools
import os
import time
import weakref

from vramprobe_values.imports import instead_of

from .journal import tell, warn

#: The prompt is the first token's, and the second waits for what is made once; the third shows the pace.
_NO_PACE_TOKENS = 2
_LONG_SECONDS = _EVERY_SECONDS = 60.0
_SHORTER = (
    "to shorten it, generate fewer tokens (TRL's max_completion_length; what the step keeps shrinks with it: two "
    "lengths show by how much), or by an engine (use_vllm)"
)


#: What this process has said of a generation's pace; what does not go token by token through transformers' criterion
#: (its continuous batching, a program's own loop) says nothing, and the line a minute does (waiting.py).
told = []


class Generations:
    """One process's. ``warn(message)`` hears of the first long one; ``say(message)`` is for a person who waits."""

    def __init__(self, warn, say, now=time.monotonic):
        self._warn, self._say, self._now = warn, say, now
        self._begun = weakref.WeakKeyDictionary()  # a criterion, made anew for each → [tokens, time, said at]
        self._is_told = False

    def token(self, criterion, num_tokens, of):
        """One more token for each row; ``num_tokens``: all of a row, the prompt too; ``of``: at most."""
        first, began, said = self._begun.setdefault(criterion, [num_tokens - 1, self._now(), None])
        done, seconds = num_tokens - first - _NO_PACE_TOKENS, self._now() - began
        if done <= 0:
            self._begun[criterion][1] = self._now()
            return
        left = seconds / done * (of - num_tokens)
        if (said is None and seconds + left < _LONG_SECONDS) or (
            said is not None and self._now() < said + _EVERY_SECONDS
        ):
            return
        self._begun[criterion][2] = self._now()
        where = f"token {num_tokens - first:,} of {of - first:,}"
        if not self._is_told:
            self._is_told = True
            pace = f"transformers generates token by token, each {seconds / done:.2f} s on an emulated GPU"
            self._warn(f"{pace}: {_SHORTER}")
            self._say(f"{pace}: {where}, about {left:.0f} s to go in this generation; {_SHORTER}")
        else:
            self._say(f"{where}, about {left:.0f} s to go in this generation")


def serve(watches, module):
    """transformers.generation.stopping_criteria."""

    def say(message):
        told.append(message)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell(message)

    generations = Generations(functools.partial(warn, watches), say)

    @instead_of(module.MaxLengthCriteria, "__call__")
    def asked(run, self, input_ids, *args, **kwargs):
        generations.token(self, input_ids.shape[-1], self.max_length)
        return run(self, input_ids, *args, **kwargs)
