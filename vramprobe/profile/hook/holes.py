"""Safetensors files whose values are holes: zeros that take no disk, behind real headers.

In: what stands in a header. Out: the file. Real loaders read it. The package empty/ writes its checkpoints by it, too.
"""

import json
import struct

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def described(tensor):
    """(dtype, shape, bytes) as a header has them."""
    code = _CODES[str(tensor.dtype).removeprefix("torch.")]
    return code, list(tensor.shape), tensor.numel() * tensor.element_size()


def write_holes(path, tensors, metadata=None, contents=None):
    """Write a file of ``tensors``, described, by name; ``contents``: the bytes of those that must be right. -> bytes of
    all tensors."""
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (code, shape, size) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(start + at)
        for name in tensors.keys() & (contents or {}).keys():
            out.seek(start + header[name]["data_offsets"][0])
            out.write(contents[name])
    return at
