"""A tape on which one rank gathers and reduces as FSDP1 does: flat parameters, a unit in one piece.

In: the units, as rank_tape.py has them. Out: the Walk of one rank. No torch here. The order of events is that of torch
2.13, torch/distributed/fsdp, under accelerate's answers (BACKWARD_PRE, original parameters):

* _flat_param.py, ``unshard``: a unit is gathered into its flat parameter, of which weights are views; what is cast is
  copied beside it (``_mp_shard``) until then. Nothing is copied out. What comes from the host as it is stays beside it,
  as the original parameters are views of it (``flat_param_to``).
* _runtime_utils.py, ``_pre_backward_hook``: a unit in backward has the next one gathered at once, the loss the last.
* The gradients of the views wait for each other and are joined to one (autograd's ``split_with_sizes``), then the
  weights are freed, then they are reduced (``_post_backward_hook``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from vramprobe.terms.families import layer_place
from vramprobe.terms.graph import Value
from vramprobe.terms.rank_tape import GATHERING, REDUCING, SENDING, RankTape, Units
from vramprobe.terms.setup import Setup
from vramprobe.terms.tape import Covers
from vramprobe.terms.walk import Walk, one_of_each_kind, walk_layers


@lru_cache(maxsize=2048)
def flat_walk(setup: Setup, units: Units) -> Walk:
    """The Walk of one rank."""
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(setup, layers, FlatTape(setup.sizes.covers, units, places), units.micro_steps)


class FlatTape(RankTape):
    """A RankTape whose units are flat parameters."""

    raises_outputs = True

    def __init__(self, covers: Covers, units: Units, layers: Sequence[str]) -> None:
        super().__init__(covers, units, layers)
        self._whole: dict[str, Value] = {}  # flat gradients of the micro-steps before

    def _enter(self, phase: str, name: str) -> None:
        if phase == "forward":
            if name == "embedding":
                self._gather("root")
            self._gather(name)
        elif name in self._names:
            self._gather(name)
            self._gather(self._names[max(self._names.index(name) - 1, 0)])

    def _gather(self, name: str) -> None:
        """Into the flat parameter, from a copy in the dtype that is sent."""
        if name in self._gathered or not self._by_name[name].gathered:
            return
        copied = self._bytes(self._by_name[name].cast, "gathered_weights", SENDING)
        unit = self._by_name[name]
        self._gathered[name] = self._bytes(unit.gathered + unit.moved, "gathered_weights", GATHERING)
        del copied

    def _reduce(self, name: str) -> None:
        """Join the unit's gradients, free its weights, and keep this rank's share; before the last micro-step, all."""
        unit = self._by_name[name]
        if not unit.reduced:
            self._let_go(name)
            return
        joined = self._bytes(unit.reduced, "gradient_buckets", GATHERING)  # as what it is joined from was divided there
        self._let_go(name)
        for leaf in self._leaves[name]:
            leaf.gradient = None
        if not self._reduces:
            if name not in self._whole:
                self._recause(joined.storage, "gradients")
                self._whole[name] = joined
            return
        whole = self._whole.pop(name, joined)  # to which the joined ones are added in place
        shard = self._bytes(unit.reduced_share, "gradients", REDUCING)
        if unit.shard != unit.reduced_share:  # cast to the stored weights' dtype
            shard = self._bytes(unit.shard, "gradients", REDUCING)
        if not self._units.on_host:
            self._shards[name] = shard
        del shard
        del whole
        del joined

    def _let_go(self, name: str) -> None:
        """Of the gathered weights, which stay between micro-steps where they stay from forward to backward."""
        if self._reduces or self._units.reshards:
            self._free_whole(name)
