"""torch.compile beside the mode: Dynamo compiles with no mode of ours on the stack and never traces our code;
Inductor's buffers are known.

In: the mode. Out: patches on Dynamo's entry and on Inductor's allocation, made when those modules are imported.
"""

import functools

from .imports import when_imported
from .reads import is_our_own

CONVERT_FRAME = "torch._dynamo.convert_frame"


def keep_out(mode):
    """Patch Dynamo and Inductor's allocation for ``mode``, now or as soon as Dynamo is imported."""
    _know_inductor_buffers(mode)
    skip_our_frames()
    when_imported(CONVERT_FRAME, lambda convert_frame: _patch(convert_frame, mode))


def skip_our_frames():
    """Have Dynamo compile none of vramprobe's frames, of which the program's compiled functions call some."""

    def patch(convert_frame):
        empty = getattr(convert_frame, "ConvertFrameReturn", lambda: None)

        def compile_frame(original, frame, *args, **kwargs):
            if not is_our_own(frame.f_code.co_filename):
                return original(frame, *args, **kwargs)
            _skip_code()(frame.f_code)
            return empty()

        _around_compiling(convert_frame, compile_frame)

    when_imported(CONVERT_FRAME, patch)


def _patch(convert_frame, mode):
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    def compile_frame(original, frame, *args, **kwargs):
        popped = 0
        while (stack := _get_current_dispatch_mode_stack()) and stack[-1] is mode:
            _pop_mode()
            popped += 1
        try:
            return original(frame, *args, **kwargs)
        finally:
            for _ in range(popped):
                _push_mode(mode)

    _around_compiling(convert_frame, compile_frame)
    # Guards compare tensors' dispatch keys as the thread sees them. They are checked with the mode on, so they are
    # made with it on:
    # else torch 2.4 compiles anew at every call.
    checks = convert_frame.CheckFunctionManager
    make_checks = checks.__init__

    def make_checks_with_mode(self, *args, **kwargs):
        with mode.on_this_thread():
            make_checks(self, *args, **kwargs)

    checks.__init__ = make_checks_with_mode


def _skip_code():
    """Dynamo's own: of its C extension, and from torch 2.13 on of its Python module."""
    try:
        from torch._C._dynamo.eval_frame import skip_code
    except ImportError:
        from torch._dynamo.eval_frame import skip_code
    return skip_code


def _around_compiling(convert_frame, compile_frame):
    """Have ``compile_frame(original, frame, …)`` called for each frame that Dynamo takes up."""
    if not hasattr(convert_frame, "CatchErrorsWrapper"):  # torch 2.3: a function makes the callback
        make = convert_frame.catch_errors_wrapper

        def catch_errors_wrapper(*given):
            original = make(*given)
            return functools.wraps(original)(functools.partial(compile_frame, original))

        convert_frame.catch_errors_wrapper = catch_errors_wrapper
        return
    wrapper = convert_frame.CatchErrorsWrapper
    original = wrapper.__call__

    def call(self, frame, *args, **kwargs):
        return compile_frame(functools.partial(original, self), frame, *args, **kwargs)

    wrapper.__call__ = call


def _know_inductor_buffers(mode):
    """Compiled code takes its buffers past the dispatcher: whatever the memory held before, nobody computed it now."""
    import torch

    guards = torch._C._dynamo.guards
    original = getattr(guards, "_empty_strided_cuda", None)
    if original is None:
        return

    def empty_strided_cuda(size, stride, dtype):
        out = original(size, stride, dtype)
        address = out.data_ptr()
        if address:
            mode.driver.mark_uncomputed(address, out.untyped_storage().nbytes())
        return out

    guards._empty_strided_cuda = empty_strided_cuda
