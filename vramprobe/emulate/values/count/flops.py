"""Floating-point operations of an operator from the shapes of its tensors: products, convolutions, attention.

In: an operator's name and its arguments by name. Out: (class, FLOPs), or None for an operator that computes neither.
A multiplication and an addition are two. The formulas are our own: torch's registry (torch.utils.flop_counter, 2.0 to
2.13) takes a flash-attention kernel's [batch, length, heads, width] for [batch, heads, length, width], and counts
scores above the diagonal.
"""

#: FlashAttention-2's backward recomputes the scores: five products for the forward's two.
ATTENTION_BACKWARD = 2.5
_FIRST_FACTOR = {"addmm": "mat1", "baddbmm": "batch1", "addbmm": "batch1", "addmv": "mat"}
_SECOND_FACTOR = {"addmm": "mat2", "baddbmm": "batch2", "addbmm": "batch2"}
_PRODUCTS = (
    "mm", "bmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm",
    "addmm", "baddbmm", "addbmm", "_addmm_activation", "linear",
)  # fmt: skip


def flops_of(name, given, out):
    """(``product`` or ``attention``, FLOPs) of the operator ``name`` (``aten::mm``); None where it is neither."""
    operator = name.split("::")[-1].split(".")[0]
    if operator in _PRODUCTS:
        return "product", _product(operator, given)
    if operator in ("gemm_4bit", "int8_linear_matmul"):  # bitsandbytes': the weight's rows are the result's columns
        columns = given["shapeB"][0] if "shapeB" in given else given["B"].shape[0]
        return "product", 2 * given["A"].numel() * columns
    if operator in ("mv", "addmv"):
        return "product", 2 * given["mat" if operator == "addmv" else "self"].numel()
    if operator in ("convolution", "_convolution", "cudnn_convolution"):
        return "product", _convolution(given, out)
    if operator == "convolution_backward":
        mask = given["output_mask"]
        return "product", (bool(mask[0]) + bool(mask[1])) * _convolution(given, given["grad_output"])
    if "att" in operator:
        query, key, value = (given.get(long, given.get(long[0])) for long in ("query", "key", "value"))
        if all(hasattr(one, "shape") and one.ndim in (3, 4) for one in (query, key, value)):
            return "attention", _attention(operator, query, key, value, given)
    return None


def _product(operator, given):
    if operator == "linear":
        return 2 * given["input"].numel() * given["weight"].shape[0]
    kind = operator.replace("_addmm_activation", "addmm")
    first = given[_FIRST_FACTOR.get(kind, "self")]
    second = given[_SECOND_FACTOR.get(kind, "mat2")]
    rows = first.shape[-2] if first.ndim == 3 and second.ndim == 2 else first.numel() // first.shape[-1]
    return 2 * rows * first.shape[-1] * second.shape[-1]


def _convolution(given, out):
    """Each output element is a sum over the weights of its channel; transposed, each input element."""
    weight = given["weight"]
    points = given.get("input", given.get("self")) if given.get("transposed") else out
    return 2 * points.numel() * (weight.numel() // weight.shape[0])


def _attention(operator, query, key, value, given):
    """Two products over the pairs of a query and a key that the kernel computes."""
    if "scaled_dot_product" in operator:  # [batch, heads, length, width]
        batch, heads, num_queries, width = query.shape
        num_keys = key.shape[2]
    elif query.ndim == 4:  # [batch, length, heads, width]
        batch, num_queries, heads, width = query.shape
        num_keys = key.shape[1]
    else:  # [tokens, heads, width] of several sequences, whose lengths lie on the card: all taken as the longest
        num_queries = _longest(given, "q") or query.shape[0]
        num_keys = _longest(given, "k") or key.shape[0]
        batch, heads, width = query.shape[0] / num_queries, query.shape[1], query.shape[2]
    pairs = pairs_of(num_queries, num_keys, _is_causal(given), _window(given))
    forward = 2 * batch * heads * pairs * (width + value.shape[-1])
    return int(forward * (ATTENTION_BACKWARD if "backward" in operator else 1))


def pairs_of(num_queries, num_keys, is_causal, window=None):
    """Pairs of a query and a key: all, or those on and below the diagonal, the last ``window`` keys of each."""
    if not is_causal:
        return num_queries * num_keys
    reach = min(num_keys, num_queries if window is None else window)
    first = min(reach, num_queries)
    return first * (first + 1) // 2 + (num_queries - first) * reach


def _is_causal(given):
    if isinstance(given.get("custom_mask_type"), int):
        return given["custom_mask_type"] > 0
    return bool(given.get("is_causal") or given.get("causal"))


def _window(given):
    left = given.get("window_size_left")
    return left + 1 if isinstance(left, int) and left >= 0 else None


def _longest(given, which):
    for name in (f"max_{which}", f"max_seqlen_{which}"):
        if isinstance(given.get(name), int):
            return given[name]
    return None
