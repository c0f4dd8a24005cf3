"""Mark the stages of a training loop by torch's own hooks: forward, backward, optimizer step, zero_grad, evaluation.

In: a Phases. Out: its marks as the program runs. Forward by hooks of the outermost module alone (a hook on each
would be compiled with it); backward where Python enters the autograd engine, whoever calls it; the step by the global
hooks of optimizers, or as own_steps.py tells it.
"""

import functools
import sys
import warnings

import torch
from torch.optim import optimizer as optim
from vramprobe_values.imports import instead_of

from .graphs import Graphs
from .own_steps import OwnSteps

_MAX_FRAMES = 60


class Marks:
    """The hooks of one process. ``on_forward(module)``, ``on_backward_end()``, ``on_step_begin(optimizer)``,
    ``on_optimizer(optimizer)`` (has stepped): what is to be looked at, when."""

    def __reduce__(self):
        """An empty Marks: torch's ahead-of-time compile pickles all global module hooks with a module's guards."""
        return object.__new__, (Marks,)

    def __init__(self, phases, on_forward, on_backward_end, on_step_begin, on_optimizer):
        self._phases, self._on_forward, self._on_backward_end = phases, on_forward, on_backward_end
        self._on_step_begin, self._on_optimizer = on_step_begin, on_optimizer
        self._depth = {"forward": 0, "backward": 0, "zero_grad": 0}
        self._has_closure = False  # within an optimizer's step that computes the loss itself
        self._roots = set()
        self.optimizers = {}  # by id, from their first step's beginning on
        self._own_steps = OwnSteps()
        phases.has_stepped = self._own_steps.has_stepped
        _let_compile_ignore_our_hooks()
        self._discovery, self._is_settled = None, False  # settled: all that take part in a step are known
        self._discover()
        optim.register_optimizer_step_pre_hook(self._before_step)
        optim.register_optimizer_step_post_hook(self._after_step)
        torch.autograd.Variable._execution_engine = self._watched_engine()
        Graphs(phases, self._in_backward)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            instead_of(owner, "zero_grad")(self._zero_grad)

    def _discover(self):
        """Look for outermost modules until the first backward, but not within the forward of one that trains: what is
        compiled in there must see no hook."""
        if self._discovery is None and not self._is_settled:
            self._discovery = torch.nn.modules.module.register_module_forward_pre_hook(self._before_any_module)

    def _look_away(self):
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None

    def _settle(self):
        self._is_settled = True
        self._look_away()

    def _before_any_module(self, module, args):
        """The outermost module of a call is watched from now on."""
        if self._depth["forward"] or self._depth["backward"] or not _is_on_a_card(module):
            return
        if _is_within("get_parametrized") or _is_within("register_parametrization"):
            return  # a weight that is read, as bitsandbytes' 4-bit experts are while they are loaded
        if _is_compiled(module):
            self._settle()
        elif torch.is_grad_enabled():
            self._look_away()
        if id(module) not in self._roots:
            self._roots.add(id(module))
            if _is_compiled(module):
                self._forward_begins(module)
                return
            module.register_forward_pre_hook(self._before_root)
            module.register_forward_hook(self._after_root, always_call=True)
            self._before_root(module, args)  # this call has its list of hooks already

    def _before_root(self, module, args):
        if self._depth["forward"] == 0 and self._depth["backward"] == 0:
            self._forward_begins(module)
        self._depth["forward"] += 1

    def _forward_begins(self, module):
        if torch.is_grad_enabled() and (module.training or not self._phases.is_outside):
            self._phases.mark("forward")
            self._on_forward(module)
        else:
            is_generated = _is_within("generate")
            self._phases.mark("generation" if is_generated else "evaluation")
            if not is_generated:  # as of a reference model, whose weights are held too
                self._on_forward(module)

    def _after_root(self, module, args, output):
        self._depth["forward"] -= 1
        if self._depth["forward"] == 0 and self._depth["backward"] == 0:
            self._discover()
            if not torch.is_grad_enabled() or self._phases.is_outside:
                self._phases.mark("other")

    def _watched_engine(self):
        """torch's engine, which torch.autograd.backward and .grad call, and some frameworks (Megatron) themselves."""
        marks = self

        class WatchedEngine(torch._C._ImperativeEngine):
            def run_backward(self, *args, **kwargs):
                run = functools.partial(super().run_backward, *args, **kwargs)
                outputs = kwargs.get("tensors", args[0] if args else ())
                if marks._depth["forward"] or _is_traced(outputs):
                    return run()  # a part of the forward: forces, what a compiler asks
                if marks._depth["backward"]:
                    return marks._in_backward(run)
                leaves = marks._own_steps.leaves(outputs, kwargs.get("inputs", args[4] if len(args) > 4 else ()))
                try:
                    return marks._in_backward(run)
                finally:
                    marks._own_steps.backward_ended(leaves)

        return WatchedEngine()

    def _in_backward(self, run):
        if self._depth["backward"] == 0:
            self._settle()
            self._phases.mark("backward")
        self._depth["backward"] += 1
        try:
            return run()
        finally:
            self._depth["backward"] -= 1
            if self._depth["backward"] == 0:
                self._on_backward_end()
                self._phases.mark("optimizer_step" if self._has_closure else "other")
                self._phases.is_stepping = self._has_closure

    def _before_step(self, optimizer, args, kwargs):
        self.optimizers[id(optimizer)] = optimizer
        self._own_steps.turn_off()
        self._on_step_begin(optimizer)
        if self._depth["backward"]:
            return
        if kwargs.get("closure") is None and (len(args) < 2 or args[1] is None):
            self._phases.mark("optimizer_step")
        else:  # as LBFGS needs it, and Lightning does: the step begins when the closure has come back
            self._has_closure = True

    def _after_step(self, optimizer, args, kwargs):
        self._on_optimizer(optimizer)
        self._phases.stepped()
        self._has_closure = self._phases.is_stepping = False
        if self._depth["backward"] == 0:
            self._phases.mark("other")

    def _zero_grad(self, zero_grad, *args, **kwargs):
        is_outermost = not any(self._depth.values())
        if is_outermost:
            self._phases.mark("zero_grad")
        self._depth["zero_grad"] += 1
        try:
            return zero_grad(*args, **kwargs)
        finally:
            self._depth["zero_grad"] -= 1
            if is_outermost:
                self._phases.mark("other")


def _let_compile_ignore_our_hooks():
    """torch.compile warns of global hooks; of ours it need not. torch 2.4 does not know, and does not warn."""
    if not getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)():
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")


def _is_traced(outputs):
    """Return True if a compiler follows the backward with tensors that have no memory."""
    return any(type(output).__module__.startswith("torch._subclasses") for output in outputs)


def _is_on_a_card(module):
    """Return True if it has anything on a card; one of the host's modules trains nothing here."""
    kind = torch.nn.Module  # Megatron's DistributedDataParallel has a list by the name of buffers
    tensors = (*kind.parameters(module), *kind.buffers(module))
    return any(tensor.is_cuda for tensor in tensors)


def _is_compiled(module):
    return type(module).__name__ == "OptimizedModule" or any(
        getattr(part, "_compiled_call_impl", None) is not None for part in module.modules()
    )


def _is_within(function):
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
