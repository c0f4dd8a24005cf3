"""Kernels of the hub that are not in its cache, and which an offline hub does not give: said, as programs take others.

In: the package ``kernels`` as it is imported. Out: for each that could not be loaded a line and a note of the profile;
the program sees the same exception.
"""

import functools


def serve(module, *, replacements):
    """kernels.get_kernel."""
    plain = module.get_kernel

    @functools.wraps(plain)
    def get_kernel(repo_id, *words, **options):
        try:
            return plain(repo_id, *words, **options)
        except Exception as error:
            replacements.missing(
                f"the kernel {repo_id} of the hub was not loaded ({type(error).__name__}): the hub is offline under "
                "--empty-weights, and a program that takes another kernel instead (SDPA for FlashAttention 3) needs "
                f"other memory; fetch it once: hf download {repo_id}"
            )
            raise

    module.get_kernel = get_kernel
