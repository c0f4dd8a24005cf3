"""The tensors whose cause is known: a module's weights, their gradients, an optimizer's masters and state; storages by
address.

In: live modules and optimizers. Out: ``{"cause", "time_ns", "storages": {address: bytes}, "names": {address: name}}``.
As workload/storages.py does for the models that this package builds; here they are anybody's, so a tensor may be a
wrapper (DTensor, torchao's quantised ones), and what cannot be asked is left out.
"""

import gc
import sys
import time
import weakref
from dataclasses import fields, is_dataclass

import torch

#: bitsandbytes: Params4bit.quant_state; Int8Params.CB and SCB until the first forward, Linear8bitLt.state afterwards.
_BESIDE_A_PARAMETER, _BESIDE_A_MODULE = ("quant_state", "CB", "SCB"), ("state",)
_ENGINES = ("vllm.", "sglang.")  # their models are known as such (engine.py)
_QUANTISED = ("Params4bit", "Int8Params")
#: Where DeepSpeed's ZeRO keeps what it has averaged, by group of parameters, until its optimizer steps.
_ZERO_GRADIENTS = ("averaged_gradients", "all_grad_tensors")
_zero_kinds, _zero = set(), weakref.WeakSet()
_SHARD = "ds_tensor"  # ZeRO-3 keeps a parameter's shard in this attribute of it


def weights(module):
    """Parameters, buffers and what bitsandbytes keeps beside a quantised weight."""
    return _holding("weights", _weights(module))


def weights_of_all():
    """The weights of every module of this process, whether it has run or not."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    return _holding("weights", (named for module in modules for named in _weights_of_part(module)))


def other_models(known):
    """The weights of models of this process that are none of ``known`` (by id) and part of none: EMA copies, models for
    reference that are yet to run. Named by their class."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    modules = [one for one in modules if "_modules" in one.__dict__ and not type(one).__module__.startswith(_ENGINES)]
    parts = {id(part) for one in modules for part in one._modules.values()}
    seen = {id(part) for one in known for part in one.modules()}
    others = [one for one in modules if id(one) not in parts and id(one) not in seen]
    return _holding(
        "weights",
        ((f"another {type(one).__name__}.{name}", tensor) for one in others for name, tensor in _weights(one)),
    )


def gradients(modules, optimizers):
    """Every gradient alive now, of the modules' and the optimizers' parameters: ``.grad``, and what frameworks keep
    under a name of their own, as Megatron's ``main_grad``; a flat buffer that they are views of is one storage."""
    parameters = [named for module in modules for named in module.named_parameters()]
    parameters += [("", one) for one in _stepped(optimizers)]
    found = [(name, tensor) for name, one in parameters for tensor in _gradients_of(one)]
    return _holding("gradients", [*found, *(("", tensor) for tensor in _tensors_in(_averaged_by_zero()))])


def _averaged_by_zero():
    return [getattr(one, name, None) for one in _zero_optimizers() for name in _ZERO_GRADIENTS]


def _zero_optimizers():
    """DeepSpeed's: those that are there when it is first seen, found among all objects once, and each that is made."""
    kind = getattr(sys.modules.get("deepspeed.runtime.base_optimizer"), "ZeROOptimizer", None)
    if kind is not None and kind not in _zero_kinds:
        _zero_kinds.add(kind)
        _zero.update(one for one in gc.get_objects() if issubclass(type(one), kind))

        def made(cls, *_, **__):
            one = object.__new__(cls)
            _zero.add(one)
            return one

        kind.__new__ = made
    return list(_zero)


def _gradients_of(parameter):
    found = [parameter.grad, *(value for name, value in vars(parameter).items() if "grad" in name)]
    return [one for one in found if isinstance(one, torch.Tensor)]


def masters(optimizers):
    """Return what the optimizers step and no module has: a copy of the weights in another dtype or shape. Where no
    module has weights at all, as in a program without modules, these are the weights.
    """
    of_modules = weights_of_all()["storages"]
    stepped = _holding("master_weights", (("", one) for one in _stepped(optimizers)))
    own = {address: size for address, size in stepped["storages"].items() if address not in of_modules}
    beside = [value for one in optimizers for name, value in vars(one).items() if "master" in name]  # Apex's FusedAdam
    beside += _states(optimizers, are_masters=True)
    more = _holding("master_weights", (("", tensor) for tensor in _tensors_in(beside)))["storages"]
    cause = "master_weights" if of_modules else "weights"
    return stepped | {"cause": cause, "storages": own | more}


def optimizer_state(optimizers):
    """Every tensor of the optimizers' states on a card."""
    states = list(_states(optimizers, are_masters=False))
    return _holding("optimizer_state", (("", tensor) for tensor in _tensors_in(states)))


def _states(optimizers, *, are_masters):
    """The values of the optimizers' states that are named as masters, as Transformer Engine does; or the others."""
    for optimizer in optimizers:
        for one in dict(optimizer.state).values():
            named = one.items() if isinstance(one, dict) else [("", one)]
            yield from (value for name, value in named if ("master" in str(name)) == are_masters)


def _stepped(optimizers):
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def named(cause, tensors):
    """These (name, tensor) pairs as one cause."""
    return _holding(cause, tensors)


def _holding(cause, named):
    storages, names = {}, {}
    for name, tensor in named:
        for inner in _plain(tensor):
            try:
                storage = inner.untyped_storage()
                address, num_bytes = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError, ValueError):  # meta, freed by a sharder, or without a storage
                continue
            if inner.is_cuda and num_bytes and address:
                storages[address] = num_bytes
                if name:
                    names.setdefault(address, name)
    return {"cause": cause, "time_ns": time.time_ns(), "storages": storages, "names": names}


def _plain(tensor):
    """The tensors inside a wrapper subclass; others are themselves."""
    tensor = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    if hasattr(tensor, "_local_tensor"):
        return [tensor._local_tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return [plain for name in inner for plain in _plain(getattr(tensor, name))]
    return [tensor]


def _weights(module):
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, part in module.named_modules():
        yield from _beside(path, part)


def _weights_of_part(part):
    """Yield the weights of a module itself, without those within it, even if its ``__init__`` has not ended yet."""
    name = type(part).__name__
    for kind in ("_parameters", "_buffers"):
        found = part.__dict__.get(kind) or {}
        yield from ((f"{name}.{key}", tensor) for key, tensor in found.items() if tensor is not None)
    if "_parameters" in part.__dict__:
        yield from _beside(name, part)


def _beside(path, part):
    for name, parameter in part.named_parameters(recurse=False):
        if (shard := getattr(parameter, _SHARD, None)) is not None:
            yield f"{path}.{name}", shard
        if type(parameter).__name__ in _QUANTISED:
            beside = [getattr(parameter, one, None) for one in _BESIDE_A_PARAMETER]
            beside += [getattr(part, one, None) for one in _BESIDE_A_MODULE]
            yield from ((f"{path}.{name}", tensor) for tensor in _tensors_in(beside))


def _tensors_in(value, seen=None):
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner, seen)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None), seen)
    elif type(value).__module__.startswith("bitsandbytes"):
        yield from _tensors_in(vars(value), seen)
