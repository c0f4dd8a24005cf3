"""The mode's rules, on CPU tensors whose kernels do nothing: what is computed, what is assumed, and who read it."""

import threading

import pytest
import torch
from values_on_cpu import TrueValuesOnCpu, known

from vramprobe.emulate.values import mode as values_mode
from vramprobe.emulate.values.known import ASSUMED, COMPUTED, UNCOMPUTED
from vramprobe.emulate.values.policy import Policy


def big(mode, rows=256, columns=256):
    """A float tensor over the limit of 64 KiB: nobody computes it."""
    tensor = torch.empty(rows, columns)
    assert mode.state(tensor) == UNCOMPUTED
    return tensor


def test_small_tensors_hold_true_values():
    with TrueValuesOnCpu() as mode:
        x = torch.arange(10)
        total = (x * 2 + 1).sum()
        assert mode.state(total) == COMPUTED
        assert total.item() == 100
        x[3:5].add_(10)
        assert x.tolist() == [0, 1, 2, 13, 14, 5, 6, 7, 8, 9]
    assert mode.report()["reads"] == []


def test_a_view_of_a_computed_tensor_is_computed_and_one_element_written_is_only_that():
    with TrueValuesOnCpu() as mode:
        x = torch.empty(8)
        x[2].fill_(5.0)
        assert mode.state(x[2]) == COMPUTED
        assert mode.state(x) == mode.state(x[1:2]) == UNCOMPUTED
        assert (x + 1).tolist() == [1, 1, 6, 1, 1, 1, 1, 1]  # the others are what the policy says, the one is kept


def test_data_of_an_inference_tensor_has_a_version_counter_where_torch_sets_one(monkeypatch):
    monkeypatch.setattr(values_mode, "COUNTS_VERSIONS", True)
    with torch.inference_mode(), TrueValuesOnCpu():
        x = torch.arange(12).view(3, 4)[1:, 2:]
        again = x.data
        assert not again.is_inference()  # "Cannot set version_counter for inference tensor", in torch 2.3
        assert (again.data_ptr(), again.shape, again.stride()) == (x.data_ptr(), x.shape, x.stride())
        assert again.tolist() == [[6, 7], [10, 11]]


@pytest.mark.parametrize(("contents", "expected"), [("zeros", 0.0), ("ones", 1.0)])
def test_a_small_result_of_something_big_is_assumed(contents, expected):
    with TrueValuesOnCpu(Policy(contents=contents)) as mode:
        norm = big(mode).norm()
        assert mode.state(norm) == ASSUMED
        assert norm.item() == expected
        assert mode.state(norm + 1) == ASSUMED  # really computed, from an assumed one
    (read,) = mode.report()["reads"]
    assert (read["state"], read["kind"], read["operator"]) == ("assumed", "number", "item")
    assert read["line"].endswith(f"test_values_mode.py:{line_of('assert norm.item() == expected')}")


def line_of(words):
    """The number of the first line of this file with ``words``."""
    with open(__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, start=1) if words in line)


def test_finite_checks_of_something_big_say_finite():
    with TrueValuesOnCpu() as mode:
        x = big(mode)
        assert torch.isfinite(x).all()
        assert not x.isnan().any()
        assert torch.isfinite(big(mode, 8200, 8200)).all()  # a mask of over 64 MiB: nobody computes it


def test_what_something_big_is_added_to_holds_nothing_that_was_left_in_its_memory():
    with TrueValuesOnCpu() as mode:
        gradient = torch.empty(256)
        gradient.numpy()[:] = float("nan")  # as another tensor left it
        gradient.addmv_(big(mode), torch.ones(256))
        assert mode.state(gradient) == ASSUMED
        assert torch.isfinite(gradient.amax()).item()


def test_what_only_big_computes_is_marked_uncomputed_even_over_old_knowledge():
    with TrueValuesOnCpu() as mode:
        x = torch.empty(256, 256)
        mode.driver.mark_computed(x.data_ptr(), x.numel() * 4)
        x.mul_(2)
        assert mode.state(x) == UNCOMPUTED


def test_a_branch_on_a_float_could_have_steered_and_a_logged_float_could_not_at_once():
    with TrueValuesOnCpu() as mode:
        loss = big(mode).sum()
        loss.item()
        if loss > 3:
            raise AssertionError
        if loss:
            raise AssertionError
    kinds = [(read["dtype"], read["kind"], read["could_have_steered"]) for read in mode.report()["reads"]]
    assert sorted(kinds) == [("bool", "control", True), ("float32", "control", True), ("float32", "number", False)]


def test_large_masks_are_computed_where_all_they_are_made_of_is_known():
    with TrueValuesOnCpu() as mode:
        at = torch.arange(2048)
        causal = at[:, None] >= at[None, :]  # 4 MiB of bool
        assert mode.state(causal) == COMPUTED
        assert int(causal.sum()) == 2048 * 2049 // 2
        assert mode.state(big(mode, 2048, 2048) > 0) == UNCOMPUTED


def test_large_floats_are_computed_where_they_are_a_mask_that_was_cast():
    with TrueValuesOnCpu() as mode:
        at = torch.arange(256)
        weights = (at[:, None] == at[None, :]).float() / 4  # 256 KiB, as Gemma 4 pools an image's patches
        assert mode.state(weights) == COMPUTED
        assert int((weights > 0).any(dim=1).sum()) == 256
        assert mode.state(weights @ big(mode)) == UNCOMPUTED
        assert mode.state(torch.zeros(256, 256)) == UNCOMPUTED  # of no mask: too large to be computed


def test_counts_are_handed_to_data_dependent_operators():
    with TrueValuesOnCpu() as mode:
        x = known(mode, [3, 1, 3, 2, 0])
        for call, expected in [
            (lambda: x.nonzero(), [4]),
            (lambda: x[x > 1], [3]),
            (lambda: torch.unique(x), [4]),
            (lambda: torch.bincount(x), [0, 3]),
            (lambda: torch.repeat_interleave(x), [9, 1]),
        ]:
            mode.driver.injected.clear()
            mode.driver.cleared = 0
            call()
            assert mode.driver.injected == expected
            assert mode.driver.cleared >= 1


@pytest.mark.parametrize("num_tokens", [4096, 1 << 17])  # the second: neither scores nor what topk gives are small
@pytest.mark.parametrize(("routing", "shares"), [("even", [0.25] * 8), ("one_expert", [1, 1] + [0] * 6)])
def test_experts_get_even_shares_unless_told(routing, shares, num_tokens):
    with TrueValuesOnCpu(Policy(routing=routing)) as mode:
        weights, chosen = big(mode, num_tokens, 8).softmax(-1).topk(2)
        assert mode.state(chosen) == ASSUMED
        assert mode.state(weights) == (ASSUMED if num_tokens == 4096 else UNCOMPUTED)
        mask = torch.nn.functional.one_hot(chosen, 8).permute(2, 1, 0)
        found = [len(torch.where(mask[expert])[1]) for expert in range(8)]
    assert found == [num_tokens * share for share in shares]


def test_choosing_among_known_scores_is_real():
    with TrueValuesOnCpu() as mode:
        values, indices = known(mode, [0.1, 0.7, 0.2]).topk(2)
        assert indices.tolist() == [1, 2]
        assert values.tolist() == pytest.approx([0.7, 0.2])


def test_partly_known_tensors_keep_what_is_known_under_every_contents():
    for contents in ("zeros", "ones", "random"):
        with TrueValuesOnCpu(Policy(contents=contents)) as mode:
            x = torch.empty(64, dtype=torch.int64)
            x[:32].fill_(7)
            assert x.sum().item() >= 32 * 7
            assert mode.state(x) == ASSUMED
            assert x[:32].tolist() == [7] * 32


def test_non_finite_check_of_a_grad_scaler_takes_gradients_for_finite():
    with TrueValuesOnCpu() as mode:
        found, inverse = torch.zeros(()), torch.ones(())
        torch._amp_foreach_non_finite_check_and_unscale_([big(mode)], found, inverse)
        assert found.item() == 0.0
    assert [read["state"] for read in mode.report()["reads"]] == ["assumed"]


def test_subclasses_are_followed_inside():
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return cls(func(*[at.inner if isinstance(at, cls) else at for at in args], **(kwargs or {})))

    with TrueValuesOnCpu() as mode:
        result = Wrapped(torch.arange(4)) * 3
        assert result.inner.tolist() == [0, 3, 6, 9]
        assert mode.state(result.inner) == COMPUTED


def test_fake_tensors_pass():
    from torch._subclasses import FakeTensorMode

    with TrueValuesOnCpu(), FakeTensorMode():
        assert (torch.ones(4) + torch.ones(4)).shape == (4,)
    with FakeTensorMode():
        fake = torch.ones(4)
        with TrueValuesOnCpu():
            assert (fake + fake).sum().shape == ()


def test_inference_mode_follows_composite_operators():
    with TrueValuesOnCpu() as mode, torch.inference_mode():
        assert torch.nn.functional.one_hot(known(mode, [2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
        mode.driver.injected.clear()
        torch.where(known(mode, [True, False, True]))  # arrives whole; its nonzero needs a count
        assert mode.driver.injected == [2]


def test_a_thread_of_autograd_has_the_mode_and_a_plain_thread_has_not():
    with TrueValuesOnCpu() as mode:
        x = torch.ones(4, requires_grad=True)
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3.0] * 4
        seen = []
        thread = threading.Thread(target=lambda: seen.append(mode.state(torch.ones(4))))
        thread.start()
        thread.join()
    assert seen == [UNCOMPUTED]  # which is why enable() puts it on new threads


def test_random_numbers_are_real_and_leave_the_cpu_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    with TrueValuesOnCpu() as mode:
        kept = torch.nn.functional.dropout(torch.ones(4096), 0.5).count_nonzero()
        assert mode.state(kept) == COMPUTED
        assert 1500 < kept.item() < 2600
    assert not torch.equal(
        before, torch.random.get_rng_state()
    )  # the launch itself drew; see the driver's test for a card


def test_wrong_policies_are_refused():
    with pytest.raises(ValueError, match="zeros, ones, random"):
        Policy(contents="twos")
    with pytest.raises(ValueError, match="even, one_expert"):
        Policy(routing="odd")


def test_a_tensor_made_of_the_hosts_numbers_is_computed_whatever_lay_there_before():
    """``torch.tensor([32], device="cuda")``: the mode sees no more of it than this operator."""
    mode = TrueValuesOnCpu()
    tensor = known(mode, [32.0, 32.0])
    mode.known.assumed.add(tensor.data_ptr(), tensor.data_ptr() + 8)
    with mode:
        assert torch.ops.aten.lift_fresh(tensor).max().item() == 32
    assert mode.report()["reads"] == []


def test_the_driver_learns_once_that_its_process_trains():
    with TrueValuesOnCpu() as mode:
        weight = torch.zeros(8, requires_grad=True)
        loss = (weight * weight).sum()
        before = mode.driver.times_trained
        loss.backward()
        (weight * 2).sum().backward()
    assert (before, mode.driver.times_trained) == (0, 1)


def test_undefined_tensors_in_a_returned_list_become_empty_ones():
    """FlashAttention 3 returns some; they are None in Python, and no ``Tensor[]`` takes None back."""

    class Attention:
        namespace = "flash_attn_3"

        @staticmethod
        def _op_dk(key, *args):
            return [args[0], None]

    with TrueValuesOnCpu() as mode:
        out, undefined = mode._launch_in_parts(Attention, "CUDA", (torch.ones(3),), {})
    assert (out.tolist(), undefined.shape, undefined.device.type) == ([1.0] * 3, (0,), "cpu")


def test_a_number_copied_into_a_tensor_is_its_value():
    """``scale.copy_(1.0)``: the operator comes with the number itself."""
    with TrueValuesOnCpu() as mode:
        scale = torch.empty(2)
        scale.copy_(448.0)
        assert (mode.state(scale), scale.tolist()) == (COMPUTED, [448.0] * 2)
    assert mode.report()["reads"] == []


def test_a_row_of_every_matrix_that_nobody_computed_is_asked_for_once(monkeypatch):
    mode = TrueValuesOnCpu()
    with mode:
        matrices = torch.empty(2, 1024, 8, 8)
        asked = []
        for name in ("is_computed", "any_computed", "mark_uncomputed"):
            plain = getattr(mode.driver, name)
            for holder in (mode.driver, mode.known):
                if hasattr(holder, name):
                    monkeypatch.setattr(holder, name, lambda *span, plain=plain: asked.append(span) or plain(*span))
        matrices[..., 3, :3] = 1.0 * matrices[..., 4, :3]
    assert 0 < len(asked) < 20  # once a run: 2,048 runs


def test_one_known_element_of_a_row_that_nobody_computed_loses_its_mark_with_the_row():
    mode = TrueValuesOnCpu()
    matrices = torch.empty(64, 64, 64)
    one = matrices[5, 3, :3]
    mode.known.mark(one, COMPUTED)
    assert mode.state(matrices[:, 3, :3]) == UNCOMPUTED
    assert mode.state(one) == COMPUTED
    mode.known.mark(matrices[:, 3, :3], UNCOMPUTED)
    assert mode.state(one) == UNCOMPUTED
