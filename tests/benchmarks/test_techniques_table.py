"""The table of techniques: fresh, an error told in its own words."""

import pytest
from scripts import script


def test_the_tables_are_what_the_journal_says() -> None:
    with pytest.raises(SystemExit) as stopped:
        script("techniques.tables").write(script("techniques.techniques").entries(), check=True)
    assert stopped.value.code == 0


def test_a_run_that_failed_is_told_by_its_error() -> None:
    outcome = script("techniques.tables")._outcome
    failed = {"outcome": {"kind": "error", "last_lines": ["  at line 1", "ImportError: no such kernel", "note: ended"]}}
    assert outcome(failed) == "error: ImportError: no such kernel"
    assert outcome({"outcome": {"kind": "oom", "phase": "forward"}}) == "out of memory in forward"


def test_another_gpu_or_argument_is_another_run() -> None:
    runs, registry = script("techniques.runs"), __import__("vramprobe.techniques.registry", fromlist=["bases"])
    bases, sgd = registry.bases(), registry.techniques()["sgd"]
    marks = {runs.fingerprint(base, several) for base in bases.values() for several in ([], [sgd])}
    assert len(marks) == 2 * len(bases)


def test_decompositions_have_the_shapes_of_torchs_own() -> None:
    torch = pytest.importorskip("torch")
    own = (torch.linalg.svd, torch.linalg.qr, torch.linalg.solve)
    try:
        ours = __import__("benchmarks.techniques.decompositions", fromlist=["svd"])
        for shape in ((5, 3), (3, 5), (2, 4, 4)):
            matrix = torch.randn(*shape)
            for full in (True, False):
                made, real = ours.svd(matrix, full_matrices=full), own[0](matrix, full_matrices=full)
                assert [one.shape for one in made] == [one.shape for one in real]
            assert [one.shape for one in ours.qr(matrix)] == [one.shape for one in own[1](matrix)]
        square, other = torch.randn(2, 4, 4), torch.randn(2, 3, 4)
        assert ours.solve(square, other, left=False).shape == own[2](square, other, left=False).shape
    finally:
        torch.linalg.svd, torch.linalg.qr, torch.linalg.solve = own
