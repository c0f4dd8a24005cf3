"""Learn the facts of an ATen operator by which its values are followed: once per overload, then looked up.

In: an ``OpOverload``. Out: an ``Operator``. It reads the schema and tags alone and runs nothing.
"""

import torch

# Their result shares memory with an argument though their schema does not say so, or they are no computation at all.
ALIASES = {
    "aten::_unsafe_view",
    "aten::lift",
    "aten::lift_fresh",
    "aten::_reshape_alias",
    "aten::detach",
    "aten::alias",
}
EMPTY = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_empty_affine_quantized",
}
# The tensor argument gives its shape, dtype or device; its values are not read.
SHAPE_ONLY = {
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
}
# In place, and what was there before does not matter.
OVERWRITES = {
    "aten::copy_",
    "aten::fill_",
    "aten::zero_",
    "aten::random_",
    "aten::normal_",
    "aten::uniform_",
    "aten::bernoulli_",
    "aten::exponential_",
    "aten::log_normal_",
    "aten::cauchy_",
    "aten::geometric_",
}
# In place on a tensor's description, not on its bytes.
METADATA = {
    "aten::detach_",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::squeeze_",
    "aten::unsqueeze_",
    "aten::transpose_",
    "aten::t_",
    "aten::swapaxes_",
    "aten::swapdims_",
    "aten::as_strided_",
    "aten::rename_",
    "aten::_resize_output_",
    "aten::record_stream",
}
COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone"}
# Each element of their results is one of the arguments', or a constant. (Pointwise operators are known by their tag.)
REARRANGES = {
    "aten::_pin_memory",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::copy_",
    "aten::fill_",
    "aten::flip",
    "aten::full_like",
    "aten::index",
    "aten::repeat",
    "aten::roll",
    "aten::stack",
    "aten::tril",
    "aten::triu",
    "aten::zero_",
    "aten::zeros_like",
}
ZEROS = {"aten::zeros", "aten::new_zeros"}  # whatever they are given
# Only these namespaces have CPU kernels that are certain to do to CPU tensors what they would to a card's; a Triton
# kernel would not.
TRUSTED = ("aten", "prims")
# Collectives: the driver moves the bytes, and knows what it moved.
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
# What Inductor calls: the kernel itself, with nothing of ATen inside that would have a value to know.
BELOW = (*COLLECTIVES, "inductor", "triton")
# prim::device and its like stand in the interpreter's table alone: the dispatcher does not know their names.
WITHOUT_KERNEL = (*BELOW, "prim")
COUNTED = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::masked_scatter_backward",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unique2",
    "aten::_unique",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::multinomial",
}
# Their kernels look at values of their own: is an input finite, did a factorization succeed, are two tensors close.
LOOKS_AT_VALUES = {"aten::allclose", "aten::isin", "aten::matrix_exp", "aten::segment_reduce", "aten::histc"}
LINEAR_ALGEBRA = ("aten::linalg_", "aten::_linalg_")  # the same, by the first letters of the name
KERNELS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
ROUTED = {
    "aten::topk",
    "aten::sort",
    "aten::argsort",
    "aten::argmax",
    "aten::argmin",
    "aten::max",
    "aten::min",
    "aten::multinomial",
}
RANDOM_GENERATORS = "generator"


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
        self.has_generator = any(a.name == RANDOM_GENERATORS for a in schema.arguments)
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
    for given in args:
        if isinstance(given, torch.Tensor):
            found.append(given)
        elif isinstance(given, (list, tuple)):
            found += [inner for inner in given if isinstance(inner, torch.Tensor)]
    for given in kwargs.values():
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
