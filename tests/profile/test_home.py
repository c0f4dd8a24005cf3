"""The temporary folder of a profile."""

import stat

import pytest

from vramprobe.profile.command import _home


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_two_runs_after_one_another_have_the_same_path_and_two_at_once_have_two():
    with _home(None, None) as first, _home(None, None) as beside:
        assert first != beside
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
    with _home(None, None) as again:
        assert again == first
        assert not list(again.iterdir())


def test_a_folder_that_is_left_is_no_other_runs(temporary):
    def interrupted():
        with _home(None, None) as left:
            (left / "1.jsonl").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with _home(None, None) as home:
        (left,) = temporary.glob("*/1.jsonl")
        assert left.parent != home


def test_no_path_that_another_user_could_have_made_is_taken(temporary):
    with _home(None, None) as home:
        name = home.name
    (temporary / "elsewhere").mkdir()
    (temporary / name).symlink_to(temporary / "elsewhere")
    with _home(None, None) as home:
        assert home.name != name
