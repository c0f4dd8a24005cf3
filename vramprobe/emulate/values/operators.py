"""Learn the facts of an ATen operator by which its values are followed: once per overload, then looked up.

In: an ``OpOverload``. Out: an ``Operator``. It reads the schema and tags alone and runs nothing.
"""

import torch


def aten(names):
    """Return a set of ATen's operators by their names without the namespace, with blanks between."""
    return frozenset(f"aten::{name}" for name in names.split())


# Their result shares memory with an argument though their schema does not say so, or they are no computation at all.
ALIASES = aten("_unsafe_view lift lift_fresh _reshape_alias detach alias")
EMPTY = aten("empty empty_strided empty_like new_empty new_empty_strided _empty_affine_quantized")
# The tensor argument gives its shape, dtype or device; its values are not read.
SHAPE_ONLY = aten("zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like randint_like")
# In place, and what was there before does not matter.
OVERWRITES = aten("copy_ fill_ zero_ random_ normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
# In place on a tensor's description, not on its bytes.
METADATA = aten(
    "detach_ requires_grad_ resize_ resize_as_ set_ squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ as_strided_ "
    "rename_ _resize_output_ record_stream"
)
COPIES = aten("copy_ _to_copy clone")
# Each element of their results is one of the arguments', or a constant. (Pointwise operators are known by their tag.)
REARRANGES = aten(
    "_pin_memory _to_copy cat clone constant_pad_nd copy_ fill_ flip full_like index repeat roll stack tril triu zero_ "
    "zeros_like"
)
ZEROS = aten("zeros new_zeros")  # whatever they are given
# Only these namespaces have CPU kernels that are certain to do to CPU tensors what they would to a card's; a Triton
# kernel would not.
TRUSTED = ("aten", "prims")
# Collectives: the driver moves the bytes, and knows what it moved.
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
# What Inductor calls: the kernel itself, with nothing of ATen inside that would have a value to know. prim::device and
# its like stand in the interpreter's table alone: the dispatcher does not know their names.
WITHOUT_KERNEL = (*COLLECTIVES, "inductor", "triton", "prim")
COUNTED = aten(
    "nonzero masked_select masked_scatter_backward index index_put index_put_ _index_put_impl_ _unique2 _unique "
    "unique_consecutive unique_dim unique_dim_consecutive bincount repeat_interleave multinomial"
)
# Their kernels look at values of their own: is an input finite, did a factorization succeed, are two tensors close.
LOOKS_AT_VALUES = aten("allclose isin matrix_exp segment_reduce histc")
LINEAR_ALGEBRA = ("aten::linalg_", "aten::_linalg_")  # the same, by the first letters of the name
KERNELS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
ROUTED = aten("topk sort argsort argmax argmin max min multinomial")


class Operator:
    """Facts of one overload: all booleans and tuples, no behaviour."""

    __slots__ = (
        "composite", "counted", "empty", "func", "has_generator", "keeps_zeros", "lifts", "moves", "name", "overwrites",
        "parts", "pure", "quiet", "random", "reads_item", "route", "shape_only", "special", "trusted", "writes",
        "writes_names",
    )  # fmt: skip

    def __init__(self, func):
        schema = func._schema
        self.func, self.name = func, (name := schema.name)
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.writes = tuple(i for i in written if not schema.arguments[i].kwarg_only)
        self.writes_names = tuple(schema.arguments[i].name for i in written)
        self.pure = not written
        self.trusted = func.namespace in TRUSTED
        self.moves = func.namespace in COLLECTIVES
        try:
            self.composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        except RuntimeError:  # prim::device and its like are no operators of the dispatcher
            self.composite = False
        looks = name in LOOKS_AT_VALUES or name.startswith(LINEAR_ALGEBRA)
        may_have_parts = looks if self.trusted else func.namespace not in WITHOUT_KERNEL
        kernels = (KERNELS if self.trusted else KERNELS[:1]) if may_have_parts and not self.composite else ()
        self.parts = next((k for k in kernels if _has_kernel(func, k)), None)
        # Views and ops that hand out no new bytes: nothing to learn from them.
        self.quiet = (
            (func.is_view and self.pure)
            or name in ALIASES
            or name in METADATA
            or not self._yields_tensors(schema, written)
        )
        self.lifts = name == "aten::lift_fresh"
        self.reads_item = name == "aten::_local_scalar_dense"
        self.empty, self.shape_only = name in EMPTY, name in SHAPE_ONLY
        self.overwrites = name in OVERWRITES or "out" in self.writes_names
        self.counted = name in COUNTED
        self.route = name if name in ROUTED else None
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        by_element = name in REARRANGES or name in ZEROS or torch.Tag.pointwise in func.tags
        self.keeps_zeros = one and by_element and not self.random and not self.quiet
        self.has_generator = any(a.name == "generator" for a in schema.arguments)
        # Handled before the op runs; everything else after it.
        self.special = self.reads_item or self.counted or self.random or name in COPIES or name == "aten::equal"
        if self.reads_item or name == "aten::equal":
            self.quiet = False

    @staticmethod
    def _yields_tensors(schema, written):
        return bool(written) or any("Tensor" in str(r.type) for r in schema.returns)


def _has_kernel(func, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def tensors_in(args, kwargs):
    """Every tensor among an operator's arguments, those within lists too, in order."""
    found = []
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.Tensor):
            found.append(given)
        elif isinstance(given, (list, tuple)):
            found += [inner for inner in given if isinstance(inner, torch.Tensor)]
    return found


def written_in(operator, func, args, kwargs):
    """The tensors that an operator writes into, by its schema."""
    found = [args[i] for i in operator.writes if i < len(args)]
    found += [kwargs[name] for name in operator.writes_names if name in kwargs]
    return tensors_in(found, {})
