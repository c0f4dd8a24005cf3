"""Speech models by id: feature extractors, Whisper's tokens at their ids, silence in rows, and a run of Whisper."""

import json
import sys
import types
import wave
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced
from grids import exhaustive
from run_command import profiled
from typer.testing import CliRunner
from vision import profiled_config

from vramprobe.cli import verbs
from vramprobe.profile import stand_ins

transformers = pytest.importorskip("transformers")
PARAMS = {"whisper-small": 241_734_912, "whisper-large-v3": 1_543_490_560, "qwen2-audio-7b": 8_397_094_912}


def config_of(slug: str) -> Any:
    raw = profiled_config(slug)
    return raw, transformers.AutoConfig.for_model(**raw)


@exhaustive
@pytest.mark.parametrize("name", PARAMS)
def test_each_has_the_published_parameters(name: str, empty) -> None:
    made = empty.checkpoint.model_of(config_of(name)[1])
    made.tie_weights()
    assert sum(one.numel() for one in made.parameters()) == PARAMS[name]


def test_a_made_processor_hears_and_writes_as_whispers_does(tmp_path: Path, empty) -> None:
    raw, config = config_of("whisper-small")
    home = tmp_path / "made"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(raw))
    empty.hub._write_tokenizer(str(home), raw, config)
    assert "30 s to a window, 80 bands" in empty.processors.write(str(home), raw, config)
    found = transformers.WhisperProcessor.from_pretrained(home, language="Hindi", task="transcribe")
    hindi = 50259 + list(transformers.models.whisper.tokenization_whisper.LANGUAGES).index("hi")
    ids = found.tokenizer("a a a").input_ids
    assert ids[:4] == [50258, hindi, 50359, 50363]
    assert ids[-1] == 50257
    assert len(ids) == 4 + 3 + 1
    assert found.tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|30.00|>"]) == [50364, 51864]
    sound = found.feature_extractor([0.0] * 16000, sampling_rate=16000).input_features[0]
    assert sound.shape == (80, 3000)


def test_silence_is_as_long_as_it_is_asked_and_read_at_any_rate(tmp_path: Path, empty) -> None:
    path = empty.media.silence(str(tmp_path), 2.5)
    with wave.open(path) as file:
        assert file.getnframes() / file.getframerate() == 2.5
    assert empty.media.silence(str(tmp_path), 2.5) == path
    found = empty.media._read(path, 8000)
    assert (len(found["array"]), found["sampling_rate"], float(abs(found["array"]).max())) == (20_000, 8000, 0.0)
    assert stand_ins.stand_ins(audio_seconds=2.5)["audio_seconds"] == 2.5


def test_only_rows_of_silence_are_read_without_the_librarys_decoder(tmp_path: Path, empty) -> None:
    class Audio:
        sampling_rate = None

        def decode_example(self, value):
            raise ImportError("To support decoding audio data, please install 'torchcodec'.")

    replacements = empty.replacements.Replacements(str(tmp_path))
    empty.media.serve_audio(types.SimpleNamespace(Audio=Audio), replacements)
    made = Audio().decode_example({"path": empty.media.silence(str(tmp_path), 1), "bytes": None})
    assert len(made["array"]) == 16_000
    with pytest.raises(ImportError, match="torchcodec"):
        Audio().decode_example({"path": "/data/mine.wav", "bytes": None})
    assert [line["kind"] for line in replaced(tmp_path)] == ["audio decoder"]


@pytest.mark.parametrize(
    ("name", "form"), [("me/my-speech", "audio_text"), ("google/fleurs", "audio_text"), ("openslr/other", "text")]
)
def test_columns_of_sound_are_guessed_from_a_name(name: str, form: str, empty, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert empty.rows.guessed(name) == form
    row = empty.rows.row_of("audio_text", 1000)
    assert list(row) == ["audio", "text"]
    assert row["text"].count("a") == 400


def test_a_length_without_rows_to_make_is_refused() -> None:
    done = CliRunner().invoke(verbs._app_for(["profile"]), ["profile", "--audio-seconds", "5", "--", "python", "x.py"])
    assert "--audio-seconds 5 is how long the sound is that --empty-weights makes" in str(done.exception)


@exhaustive
def test_whisper_is_fine_tuned_on_an_emulated_gpu(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "frameworks" / "runs" / "whisper.py"
    ended = profiled(
        tmp_path,
        script.read_text(),
        steps=2,
        words=("openai/whisper-small", "2"),
        stand_ins=stand_ins.stand_ins(seq_len=50, audio_seconds=3),
    )
    assert ended.stopped
    kinds = {line["kind"] for line in replaced(tmp_path / "run")}
    assert kinds >= {"config", "weights", "tokenizer", "processor", "dataset", "audio decoder"}
