"""transformers 5 loads in threads: on an emulated GPU one weight follows the other, so that what is reserved does not
depend on this machine.

In: ``transformers.core_model_loading``. Out: it makes no pool of threads, as under HF_DEACTIVATE_ASYNC_LOAD=1; a remark
where the pool would have run ahead of a quantizer (5.0 to 5.4), which each real run does differently.
"""

import sys

from vramprobe_values.imports import when_imported
from vramprobe_values.one_rank import remarks


def install():
    """Now, or as soon as it is imported."""
    when_imported("transformers.core_model_loading", _load_in_order)


def _load_in_order(loading):
    def no_pool(max_workers=None):
        caller = sys._getframe(1).f_locals
        quantizer = caller.get("hf_quantizer")
        if quantizer is not None and not quantizer.pre_quantized:
            whole = sum(param.numel() for param in caller["model"].parameters()) * caller["dtype"].itemsize
            remarks.append(
                f"transformers {sys.modules['transformers'].__version__} loads in {max_workers} threads that run ahead "
                f"of the quantizer: a real GPU reserves up to {whole / 2**30:.2f} GiB more in loading, differently in "
                "each run; here weights are loaded one by one, which reserves the least. HF_DEACTIVATE_ASYNC_LOAD=1 "
                "makes a real run do the same."
            )

    loading.ThreadPoolExecutor = no_pool
