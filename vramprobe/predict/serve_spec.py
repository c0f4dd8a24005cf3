"""The options that decide an engine's memory.

In: vLLM's options, checked by serve.py. Out: a frozen ServeSpec.
"""

from dataclasses import dataclass

from vramprobe.units import ITEMSIZE_BYTES


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """Options that decide an engine's memory, in vLLM's words; ``dtype`` in ours."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    dtype: str = "bf16"
    quantization: str = "none"
    has_scale_blocks: bool = False  # of the checkpoint's FP8
    kv_cache_dtype: str = "auto"
    capability: int = 9  # the GPU's, its major number
    release: str = "0.19"  # of vLLM, as in serve.RELEASES

    @property
    def item_bytes(self) -> int:
        """Bytes of an activation's element."""
        return ITEMSIZE_BYTES[self.dtype]
