"""Checks of profiles for CI: limits, what grew since a baseline, and the summary of it in Markdown."""

from pathlib import Path

import pytest
from profile_factory import WEIGHT, training
from test_analyse import ran_out
from test_shown import record_of
from typer.testing import CliRunner, Result

from vramprobe import api
from vramprobe.cli import verbs
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.profile.diff import compare, parse_limit, too_much
from vramprobe.profile.summary import markdown
from vramprobe.records import writing
from vramprobe.records.profile import ProfileRecord

MORE = 300_032  # rounds up by 512 as the saved activation itself does not, so allocated grows by the same


def grown(tmp_path: Path, extra_bytes: int = MORE) -> tuple[ProfileRecord, ProfileRecord]:
    return record_of(tmp_path / "a"), record_of(tmp_path / "b", training(extra_bytes=extra_bytes))


def vramprobe(*words: str) -> Result:
    """The command in this process; an error for its user is the text that he sees."""
    done = CliRunner().invoke(verbs.app, words)
    assert isinstance(done.exception, VramprobeError | SystemExit | None), done.exception
    return done


def saved(path: Path, record: ProfileRecord) -> str:
    writing.append(path, record)
    return str(path)


@pytest.mark.parametrize(
    ("limit", "allowed"), [("2%", 20), ("0.02", 20), ("0", 0), ("150KiB", 153_600), (" 1 % ", 10), ("2.5%", 25)]
)
def test_a_limit_is_a_share_or_an_amount(limit: str, allowed: int) -> None:
    assert parse_limit(limit)(1000) == allowed


@pytest.mark.parametrize("limit", ["much", "-1%", "1.2.3%", "200%", "5 apples", ""])
def test_what_is_no_limit_is_said_at_once(limit: str) -> None:
    with pytest.raises(SpecError, match="is not a"):
        parse_limit(limit)


def test_settings_and_versions_that_differ_are_named(tmp_path: Path) -> None:
    def with_settings(record: ProfileRecord, settings: dict[str, str], trl: str) -> ProfileRecord:
        environment = record.environment.model_copy(update={"settings": settings, "versions": {"trl": trl}})
        return record.model_copy(update={"environment": environment})

    before, after = grown(tmp_path)
    one = with_settings(before, {"optim": "adamw_torch", "gradient_checkpointing": "True"}, "0.16.0")
    other = with_settings(after, {"optim": "adamw_torch", "gradient_checkpointing": "False"}, "1.16.0")
    assert [(at.what, at.before, at.after) for at in compare(one, other).settings] == [
        ("gradient_checkpointing", "True", "False"),
        ("trl", "0.16.0", "1.16.0"),
    ]
    assert [at.what for at in compare(with_settings(before, {}, "1.16.0"), other).settings] == []
    paths = [saved(tmp_path / f"{at}.jsonl", record) for at, record in enumerate((one, other))]
    assert "gradient_checkpointing: True → False" in vramprobe("diff", *paths).output


def test_growth_counts_beyond_the_limit_and_not_at_it(tmp_path: Path) -> None:
    before, after = grown(tmp_path)
    difference = compare(before, after)
    found = {one.what: one.grown_bytes for one in difference.tiers}
    assert found["allocated"] == MORE
    at_it = too_much(difference, lambda _: max(found["allocated"], found["reserved"]))
    assert at_it == []
    (said,) = too_much(difference, lambda _: MORE - 1)[:1]
    assert said.startswith("allocated grew by 293.00 KiB (")
    assert said.endswith("), 1 B too many")
    assert too_much(compare(after, before), parse_limit("0")) == []  # what shrank
    assert too_much(compare(before, before), parse_limit("0")) == []


def test_what_was_not_seen_is_no_pass(tmp_path: Path) -> None:
    before, _ = grown(tmp_path)
    nothing = before.model_copy(update={"ranks": []})
    for pair in ((before, nothing), (nothing, before), (nothing, nothing)):
        assert too_much(compare(*pair), parse_limit("100%")) == [
            "one of the two profiles has no peak, so that its growth is not known"
        ]


def test_diff_ends_by_the_limit_and_appends_its_summary(tmp_path: Path) -> None:
    before, after = (saved(tmp_path / f"{name}.jsonl", one) for name, one in zip("ab", grown(tmp_path), strict=True))
    summary = tmp_path / "summary.md"
    done = vramprobe("diff", before, after, "--max-growth", "1MiB", "--summary", str(summary))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "over the limit" not in summary.read_text()
    done = vramprobe("diff", before, after, "--max-growth", "1%", "--summary", str(summary), "--json")
    assert done.exit_code == 1
    assert done.stdout.startswith("{")
    assert "vramprobe: --max-growth 1%: allocated grew by 293.00 KiB" in done.stderr
    assert summary.read_text().count("### GPU memory of `train.py --lr 1`") == 2
    assert "- **over the limit**: --max-growth 1%: allocated grew by 293.00 KiB" in summary.read_text()


def test_diff_reads_the_folders_of_two_runs(tmp_path: Path) -> None:
    expected = compare(*grown(tmp_path))
    done = vramprobe("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--max-growth", "1%")
    assert "--max-growth 1%: allocated grew by 293.00 KiB" in done.stderr
    assert api.diff(tmp_path / "a", tmp_path / "b").causes == expected.causes


def test_a_profile_is_held_to_its_limits(tmp_path: Path) -> None:
    before, _ = grown(tmp_path)
    baseline, run, summary = saved(tmp_path / "a.jsonl", before), str(tmp_path / "b"), tmp_path / "summary.md"
    done = vramprobe("profile", "--from", run, "--baseline", baseline, "--max-growth", "1%", "--summary", str(summary))
    assert done.exit_code == 1
    assert "--max-growth 1%: allocated grew" in done.stderr
    done = vramprobe("profile", "--from", run, "--max-allocated", "10MB", "--summary", str(summary))
    assert done.exit_code == 1
    assert "too many" in done.stderr
    assert "- **over the limit**: --max-allocated 10MB: " in summary.read_text()
    # the baseline is what was there before the run's own profile is appended to it
    done = vramprobe("profile", "--from", run, "--baseline", baseline, "--max-growth", "1%", "--save", baseline)
    assert done.exit_code == 1
    done = vramprobe("profile", "--from", run, "--baseline", baseline, "--max-growth", "0")
    assert done.exit_code == 0


def test_what_cannot_be_compared_is_said_before_the_command_runs(tmp_path: Path) -> None:
    record, _ = grown(tmp_path)
    failed = saved(tmp_path / "failed.jsonl", record_of(tmp_path / "c", exit_status=1))
    ran = tmp_path / "ran"
    for options, said in (
        (["--max-growth", "1%"], "since when? Give --baseline FILE"),
        (["--baseline", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--baseline", failed, "--max-growth", "1%"], "ended as error, so that nothing can be said of growth since"),
        (["--baseline", saved(tmp_path / "a.jsonl", record), "--max-growth", "lots"], "'lots' is not an amount"),
        (["--gpus", "H100-SXM,nope"], "unknown GPU 'nope'"),
    ):
        done = vramprobe("profile", *options, "--", "touch", str(ran))
        assert done.exit_code == 1
        assert said in str(done.exception)
        assert not ran.exists()


def test_a_run_that_ended_early_is_not_within_a_limit_of_growth(tmp_path: Path) -> None:
    before = saved(tmp_path / "a.jsonl", record_of(tmp_path / "a"))
    after = saved(tmp_path / "b.jsonl", record_of(tmp_path / "b", ran_out(), exit_status=1))
    done = vramprobe("diff", before, after, "--max-growth", "100%")
    assert done.exit_code == 1
    assert "the run ended as oom, so its growth is not known" in done.stderr
    assert vramprobe("diff", before, after).exit_code == 0


def test_the_summary_has_the_bytes_by_cause_and_line(tmp_path: Path) -> None:
    before, after = grown(tmp_path)
    alone = markdown(before).splitlines()
    assert "| weights | 5.72 MiB |" in alone
    first = alone[alone.index("| line |  |") + 2]  # the largest
    assert first == f"| `models/llama.py:3 forward (weights)` | {2 * WEIGHT / 2**20:.2f} MiB |"
    both = markdown(after, compare(before, after)).splitlines()
    assert "| saved activations | 976.57 KiB | 1.24 MiB | +293.00 KiB (+30.0%) |" in both
    assert "| `models/llama.py:3 forward (saved activations)` | 976.57 KiB | 1.24 MiB | +293.00 KiB |" in both
    assert "| live at the peak, backward of step 2 | baseline | this run | change |" in both
    same = markdown(before, compare(before, before))
    assert "No cause grew or shrank at the peak." in same
    assert "line that changed" not in same


def test_the_summary_of_an_oom_names_the_line(tmp_path: Path) -> None:
    said = markdown(record_of(tmp_path / "a", ran_out(), exit_status=1))
    assert "- **Out of memory in backward: " in said
    assert "requested by `" in said


def test_others_words_are_no_markdown(tmp_path: Path) -> None:
    record = record_of(tmp_path / "a").model_copy(
        update={"name": "a|b `c`\n# d", "warnings": ["<script>alert(1)</script> | *x*"]}
    )
    said = markdown(record)
    assert said.startswith("### GPU memory of `a\\|b 'c' # d`\n")
    assert "- &lt;script&gt;alert(1)&lt;/script&gt; \\| \\*x\\*" in said


def test_a_summary_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    before, after = (saved(tmp_path / f"{name}.jsonl", one) for name, one in zip("ab", grown(tmp_path), strict=True))
    done = vramprobe("diff", before, after, "--summary", str(tmp_path / "none" / "summary.md"))
    assert done.exit_code == 1
    assert "summary.md cannot be written: No such file or directory" in str(done.exception)
