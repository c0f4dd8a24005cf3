"""An inference engine within a process: its weights, its KV cache, and which of its memory sleeps.

In: vLLM's modules as they are imported. Out: holdings of the causes ``engine_weights`` and ``kv_cache``; the phase
``serving`` of an engine in a process of its own; a line ``asleep`` with every unmapped range whenever vLLM's allocator
has unmapped or mapped memory, which torch goes on counting as allocated; ``oom`` where it could not map it; on an
emulated card one token a step for each request whose tokens were drafted. Nothing where the process has no watch.
"""

import functools
import sys
import time

from vramprobe_values.imports import instead_of, when_imported

_DRAFTS = "which drafted tokens are accepted is not computed: none is, so each request gets one token a step"


def install(watches, listen):
    """``watches``: the list of this process's own, which may be empty still; ``listen(watch)``: an engine is here,
    which others may end by force."""

    def weights(worker, watch, *_, **__):
        listen(watch)
        model = worker.model_runner.model
        watch.hold_engine("engine_weights", (*model.named_parameters(), *model.named_buffers()))

    def cache(worker, watch, *_, **__):
        watch.hold_engine("kv_cache", (("", tensor) for tensor in _tensors(worker.model_runner.kv_caches)))

    def worker(module):
        _watch(watches, module.Worker, "load_model", after=weights)
        _watch(watches, module.Worker, "initialize_from_config", after=cache)
        _watch(watches, module.Worker, "execute_model", before=lambda watch: watch.phases.mark("serving"))
        if hasattr(module.Worker, "sleep"):
            _watch(watches, module.Worker, "sleep", after=lambda worker, watch, *_, **__: watch.phases.mark("asleep"))

    def allocator(module):
        asleep = {}
        for name in ("sleep", "discard", "wake_up"):
            if hasattr(module.CuMemAllocator, name):
                failed = _ran_out if name == "wake_up" else None
                _watch(
                    watches, module.CuMemAllocator, name, after=functools.partial(_mapped, asleep, name), failed=failed
                )

    when_imported("vllm.v1.worker.gpu_worker", worker)
    when_imported("vllm.v1.worker.gpu.spec_decode.rejection_sampler", functools.partial(_verifier, watches))
    when_imported("vllm.device_allocator.cumem", allocator)


def _watch(watches, owner, name, *, before=None, after=None, failed=None):
    """``before(watch)`` as the method is called, ``after(self, watch, …)`` once it has come back, with its words, and
    ``failed(self, watch, error, …)`` where it raises a RuntimeError."""

    @instead_of(owner, name)
    def watched(run, self, *args, **kwargs):
        if watches and before is not None:
            before(watches[-1])
        try:
            result = run(self, *args, **kwargs)
        except RuntimeError as error:
            if watches and failed is not None:
                failed(self, watches[-1], error, *args, **kwargs)
            raise
        if watches and after is not None:
            after(self, watches[-1], *args, **kwargs)
        return result


def _verifier(watches, module):
    """Set how many drafted tokens stay: an emulated card does not compute it, and with none at all no request would
    ever end. Of the drafted ones none stays, and each request whose prompt is through gets the verifier's own token.
    """
    said = []

    @instead_of(module.RejectionSampler, "__call__")
    def verified(verify, self, logits, input_batch, *args, **kwargs):
        result = verify(self, logits, input_batch, *args, **kwargs)
        for watch in watches[-1:]:
            if watch.is_emulated:
                computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
                sampled = (computed >= input_batch.prefill_len_np).astype("int32")
                logits_of = input_batch.cu_num_logits_np[1:] - input_batch.cu_num_logits_np[:-1]
                _fill(result.num_sampled, sampled)
                _fill(result.num_rejected, (logits_of - 1) * sampled)
                if not said:
                    said.append(watch.line("warning", message=_DRAFTS))
        return result


def _fill(tensor, values):
    tensor.copy_(sys.modules["torch"].from_numpy(values.astype("int32")))


def _mapped(asleep, name, allocator, watch, tags=None, **_):
    """The unmapped ranges after a call: ``asleep`` has their bytes by address, as sleep, discard and wake_up say."""
    blocks = {address: (data.handle[1], data.tag) for address, data in allocator.pointer_to_data.items()}
    for address, (size, tag) in blocks.items():
        if name == "sleep" or (name == "discard" and tag in tags):
            asleep[address] = size
        elif name == "wake_up" and (tags is None or tag in tags):
            asleep.pop(address, None)
    for address in asleep.keys() - blocks.keys():
        del asleep[address]
    watch.line("asleep", time_ns=time.time_ns(), ranges=sorted(asleep.items()))


def _ran_out(allocator, watch, error, tags=None):
    """Record an OOM with the bytes that were to be mapped, of which a part is."""
    if "out of memory" not in str(error):
        return
    wanted = sum(data.handle[1] for data in allocator.pointer_to_data.values() if tags is None or data.tag in tags)
    cuda = sys.modules["torch"].cuda
    free, total = cuda.mem_get_info()
    watch.note_oom(cuda.current_device(), wanted, total, free)


def _tensors(caches):
    """The tensors of ``kv_caches``: one by layer, or several (a state space model's)."""
    for one in caches:
        yield from one if isinstance(one, (list, tuple)) else (one,)
