"""Weights, tokenizers and rows that are not there: known answers, equal bytes, and a clear line for what cannot be."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced, repositories
from grids import exhaustive
from run_command import profiled, require_emulation, told
from typer.testing import CliRunner

from vramprobe.cli import verbs
from vramprobe.emulate.enter import entrance_for_command
from vramprobe.errors import SpecError
from vramprobe.profile import stand_ins
from vramprobe.profile.analyse import analyse
from vramprobe.records.profile import Replaced

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TRAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    tokens = torch.ones(2, 32, dtype=torch.long, device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.config.name_or_path)
"""
ROWS = """
import json, os, sys
from datasets import load_dataset
from huggingface_hub import snapshot_download
asked = []
for ignored in (["*"], None):  # whether there is one, as Axolotl asks; and all its files
    try:
        asked += os.listdir(snapshot_download("tatsu-lab/alpaca", repo_type="dataset", ignore_patterns=ignored))
    except Exception as error:
        asked.append(type(error).__name__)
chat = load_dataset("trl-lib/Capybara")
try:
    load_dataset("json", data_files="nowhere.jsonl")
except Exception as error:
    refused = type(error).__name__
seen = {name: load_dataset(name, split="train")[0] for name in (
    "HuggingFaceH4/llava-instruct-mix-vsft", "trl-lib/llava-instruct-mix", "HuggingFaceH4/rlaif-v_formatted",
    "lmms-lab/multimodal-open-r1-8k-verified",
)}
pictures = [row["image"] if "image" in row else row["images"][0] for row in seen.values()]
nli = {name: load_dataset("sentence-transformers/all-nli", name, split="dev").column_names
       for name in ("pair", "triplet", "pair-class")}
videos = [load_dataset(name, split="train")[0] for name in ("org/my-videos", "org/llava-video")]
print(json.dumps({
    "videos": [path.rpartition("/")[2] for path in (videos[0]["video"], *videos[1]["videos"])],
    "pictures": [[type(one).__module__.partition(".")[0], *one.size] for one in pictures], "nli": nli,
    "guessed": [load_dataset(name, split="train").column_names for name in ("org/my-nli", "org/my-llava")],
    "splits": sorted(chat), "columns": chat["train"].column_names, "num_rows": len(chat["train"]),
    "one_split": load_dataset("org/alpaca-de", split="train[:10%]").column_names[:2],
    "streamed": next(iter(load_dataset("org/data", split="train", streaming=True)))["text"],
    "mine": list(load_dataset("json", data_files=sys.argv[1], split="train")["text"]), "refused": refused,
    "asked": asked,
    "is_tracked": os.environ.get("DO_NOT_TRACK") != "1",
}))
"""
SAVE = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM
with open(sys.argv[1]) as file:
    config = AutoConfig.for_model(**json.load(file))
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2])
"""


def config_in(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_checkpoint_has_the_names_shapes_and_dtypes_of_a_saved_one(tied: bool, empty, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(**LLAMA | {"tie_word_embeddings": tied})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    count = empty.checkpoint.write(empty.checkpoint.model_of(config), str(tmp_path / "empty"))

    def seen(folder: str) -> dict[str, tuple]:
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}

    assert seen("empty") == seen("saved")
    assert ("lm_head.weight" in seen("empty")) != tied
    assert count == (1 if tied else 2) * 512 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
    file = tmp_path / "empty" / "model.safetensors"
    assert file.stat().st_size > 2 * count
    assert file.stat().st_blocks * 512 < 2 * count  # holes


def test_experts_are_named_as_the_hub_has_them(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(
        **LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    )
    empty.checkpoint.write(empty.checkpoint.model_of(config), str(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.block_sparse_moe.experts.1.w1.weight").get_shape() == [128, 64]


def test_shards_have_an_index_and_are_whole(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = empty.checkpoint.model_of(transformers.AutoConfig.for_model(**LLAMA))
    empty.checkpoint.write(model, str(tmp_path), max_shard_bytes=80_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert empty.present.has_weights(str(tmp_path))
    (tmp_path / sorted(set(index["weight_map"].values()))[0]).unlink()
    assert not empty.present.has_weights(str(tmp_path))


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [{}, {"bos": 1, "eos": 2, "pad": None}, {"bos": 500, "eos": 500}, {"eos": 99999}])
def test_a_tokenizer_is_as_long_as_the_vocabulary_and_knows_its_special_tokens(
    ids: dict[str, int | None], empty, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    empty.tokenizer.write(str(tmp_path), 512, ids)
    made = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(made) == 512
    assert None not in (made.eos_token_id, made.pad_token_id)
    for role, given in ids.items():
        if given is not None and given < 512:
            assert getattr(made, f"{role}_token_id") == given
    text = "häuser, Ünï\n"
    assert made.decode(made(text)["input_ids"]) == text
    chat = made.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenize=False
    )
    assert chat == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb{made.eos_token}\n"


#: Not of this repository's docs, on which the merges were trained.
PROSE = """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen and regulating the circulation. Please summarize the following article in
three sentences, and explain to the customer why the order was delayed."""


def test_english_text_comes_to_about_four_characters_a_token(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    empty.tokenizer.write(str(tmp_path), 32_000)
    made = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = made(PROSE)["input_ids"]
    assert 3 < len(PROSE) / len(ids) < 5
    assert made.decode(ids) == PROSE


def test_a_vocabulary_without_room_for_bytes_is_refused(empty, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="270 is too small"):
        empty.tokenizer.write(str(tmp_path), 270)


@pytest.mark.parametrize("length", [1, 7, 1024])
@pytest.mark.parametrize("form", ["text", "messages", "prompt_completion", "alpaca", "preference", "kto", "prompt"])
def test_a_row_has_as_many_tokens_as_asked(form: str, length: int, empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    empty.tokenizer.write(str(tmp_path), 1000)
    made = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    row = empty.rows.row_of(form, length)
    if form == "text":
        assert len(made(row["text"])["input_ids"]) == length
        return
    texts = [row["messages"][0]["content"], row["messages"][1]["content"]] if form == "messages" else []
    texts = texts or [row[one] for one in ("prompt", "instruction", "completion", "output", "chosen") if one in row]
    assert length <= sum(len(made(text)["input_ids"]) for text in texts) <= length + 1


@pytest.mark.parametrize(
    ("name", "program", "form"),
    [
        ("org/data", "sft.py", "text"),
        ("org/data", "dpo.py", "preference"),
        ("org/data", "grpo.py", "prompt"),
        ("org/my-chat", "sft.py", "messages"),
        ("org/ultrafeedback-x", "train.py", "preference"),
        ("org/alpaca-de", "train.py", "alpaca"),
        ("org/data", "kto.py", "kto"),
        ("org/pictures", "train_text_to_image_lora.py", "image_text"),
    ],
)
def test_columns_are_guessed_by_what_is_asked(name: str, program: str, form: str, empty, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/chat/{program}"])
    assert empty.rows.guessed(name) == form


def test_every_dataset_that_is_known_has_a_format(empty) -> None:
    for about in (one for each in stand_ins.stand_ins()["datasets"].values() for one in each.values()):
        assert empty.rows.row_of(about["format"], 8)
        assert about["splits"]


# -- repositories ------------------------------------------------------------------------------------------------------


def test_a_known_id_is_made_and_what_stands_in_is_named(empty, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    home = Path(folder_of("HuggingFaceTB/SmolLM2-135M"))
    assert found.name_of(str(home / "snapshots" / "1")) == "HuggingFaceTB/SmolLM2-135M"
    assert found.name_of("/data/a-model") == "/data/a-model"
    assert home.is_absolute()
    assert home.is_relative_to(tmp_path / "hub")
    snapshot = home / "snapshots" / (home / "refs" / "main").read_text()
    assert {path.name for path in snapshot.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [one["kind"] for one in replaced(tmp_path)] == ["config", "weights", "tokenizer"]
    assert "LlamaForCausalLM, 0.13 billion parameters in bfloat16, assumed" in replaced(tmp_path)[1]["by"]
    assert folder_of("HuggingFaceTB/SmolLM2-135M") == str(home)
    assert folder_of("HuggingFaceTB/SmolLM2-135M", "dataset") == "datasets--HuggingFaceTB--SmolLM2-135M"


def test_releases_that_look_into_the_cache_by_a_name_of_their_own_find_it(empty, tmp_path: Path) -> None:
    """huggingface_hub before 1.0, as transformers 4.57 asks it."""
    found, folder_of = repositories(empty, tmp_path / "run", tmp_path / "cache")
    at = Path(found.look("Qwen/Qwen3-0.6B", "config.json")[2])
    assert (at / "models--Qwen--Qwen3-0.6B") == Path(folder_of("Qwen/Qwen3-0.6B"))
    assert found.look("a/dataset", "x", repo_type="dataset")[2:] == (None, None, "dataset")
    assert found.look("no/model", "x", "elsewhere", "main")[2:] == ("elsewhere", "main", None)


def test_files_are_listed_of_what_is_made_here(empty, tmp_path: Path) -> None:
    found, _ = repositories(empty, tmp_path / "run", tmp_path / "cache")
    kind = type("HfApi", (), {"list_repo_files": lambda api, repo_id, **options: ["the hub's"]})
    module = types.SimpleNamespace(HfApi=kind, api=kind())
    empty.hub.serve_listing(module, types.SimpleNamespace(repositories=found))
    files = module.list_repo_files("Qwen/Qwen3-0.6B", revision="main")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert module.api.list_repo_files("no/model") == ["the hub's"]
    assert kind().list_repo_files("Qwen/Qwen3-0.6B", repo_type="dataset") == ["the hub's"]


def test_weights_have_the_dtype_that_the_catalog_knows_and_only_others_are_assumed(empty, tmp_path: Path) -> None:
    """GPT-2's are float32 on the hub, Qwen's bfloat16; SmolLM2's is in no source of the catalog's."""
    pytest.importorskip("transformers")
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    for name in ("openai-community/gpt2", "gpt2", "Qwen/Qwen2.5-3B-Instruct"):
        folder_of(name)
    said = [one["by"] for one in replaced(tmp_path) if one["kind"] == "weights"]
    assert [one.rpartition(" in ")[2] for one in said] == ["float32", "float32", "bfloat16"]


def test_a_tuned_model_is_taken_for_its_base_and_said_so(empty, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    assert Path(folder_of("unsloth/SmolLM2-135M-Instruct")).is_absolute()
    assert (
        "that of HuggingFaceTB/SmolLM2-135M in vramprobe's catalog, taken for alike by its name"
        in replaced(tmp_path)[0]["by"]
    )


def test_an_unknown_id_is_left_to_the_library_with_one_clear_line(empty, tmp_path: Path, capsys) -> None:
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    assert folder_of("meta-llama/Llama-3.1-9B") == "models--meta-llama--Llama-3.1-9B"
    folder_of("meta-llama/Llama-3.1-9B")
    (said,) = capsys.readouterr().err.splitlines()
    for part in ("'meta-llama/Llama-3.1-9B'", "meta-llama/Llama-3.1-8B", "config.json", "vramprobe models"):
        assert part in said
    assert [one["kind"] for one in replaced(tmp_path)] == ["missing"]


def test_the_offline_hubs_own_error_is_one_line_after_that(empty, tmp_path: Path, capsys, monkeypatch) -> None:
    usual: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: usual.append(error))
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    folder_of("black-forest-labs/FLUX.1-dev")
    capsys.readouterr()
    hubs = type("LocalEntryNotFoundError", (Exception,), {})()
    pipelines, other = OSError("Cannot load model"), ValueError("the program's own")
    pipelines.__cause__ = hubs
    for error in (pipelines, other):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "vramprobe: the command ended for that reason (OSError)\n"
    assert usual == [other]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"auto_map": {"AutoModel": "modeling.My"}}, "trust_remote_code"),
        ({"model_type": "nobody-knows"}, "not of this transformers"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantised already as this one is (quip)"),
    ],
)
def test_what_has_no_weights_is_said(changes: dict[str, Any], said: str, empty, tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    found, _ = repositories(empty, tmp_path / "run", tmp_path / "cache")
    (tmp_path / "run").mkdir()
    folder = config_in(tmp_path / "model", **changes)
    assert found.folder_for(str(folder)) == str(folder)
    assert said in capsys.readouterr().err


def cached(cache: Path, name: str, *files: str, **changes: Any) -> Path:
    """A repository in the hub's cache with a config.json and these empty files."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = config_in(home / "snapshots" / ("a" * 40), **changes)
    for file in files:
        (snapshot / file).write_text("{}")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_config_in_the_hub_s_cache_is_enough_and_the_cache_stays_as_it_is(empty, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    snapshot = cached(tmp_path / "cache", "org/mine", "generation_config.json")
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    home = Path(folder_of("org/mine"))
    made = home / "snapshots" / (home / "refs" / "main").read_text()
    assert (made / "config.json").resolve() == (snapshot / "config.json").resolve()
    assert (made / "model.safetensors").exists()
    assert {path.name for path in snapshot.iterdir()} == {"config.json", "generation_config.json"}
    assert [one["kind"] for one in replaced(tmp_path)] == ["weights", "tokenizer"]


@pytest.mark.parametrize("files", [("model.safetensors", "tokenizer.json"), ("adapter_model.safetensors",)])
def test_what_is_whole_or_no_model_stays_the_cache_s(files: tuple[str, ...], empty, tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "cache", "org/mine", *files)
    if "adapter" in files[0]:
        (snapshot / "config.json").unlink()
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    assert folder_of("org/mine") == "models--org--mine"
    assert replaced(tmp_path) == []


# -- runs --------------------------------------------------------------------------------------------------------------


def run(tmp_path: Path, name: str, script: str, *words: str, seq_len: int = 64) -> Path:
    """A script under ``--empty-weights``; -> the folder that has its run."""
    folder = tmp_path / name
    folder.mkdir()
    profiled(folder, script, words=words, stand_ins=stand_ins.stand_ins(seq_len), compiles=True)
    return folder


@exhaustive
def test_empty_weights_give_the_bytes_of_a_real_checkpoint(tmp_path: Path) -> None:
    python = require_emulation()
    config = config_in(tmp_path / "config")
    way = entrance_for_command(python, "RTX-4090")
    save = [way.python, "-c", SAVE, config / "config.json", tmp_path / "saved"]
    subprocess.run(save, env=way.environment, check=True, capture_output=True)
    shutil.rmtree(way.machine)
    there, missing = (
        analyse(run(tmp_path, name, TRAIN, str(folder)) / "run")
        for name, folder in (("there", tmp_path / "saved"), ("missing", config))
    )
    assert [one.kind for one in there.replaced] == ["tokenizer"]
    assert [one.kind for one in missing.replaced] == ["weights", "tokenizer"]
    assert there.outcome == missing.outcome
    assert there.ranks[0].peak == missing.ranks[0].peak
    assert there.ranks[0].phases == missing.ranks[0].phases
    assert there.ranks[0].at_peak == missing.ranks[0].at_peak
    assert sorted(path.name for path in config.iterdir()) == ["config.json"]


@exhaustive
def test_a_hub_id_runs_without_network_and_an_unknown_one_says_what_to_do(tmp_path: Path, capfd) -> None:
    require_emulation()
    record = analyse(run(tmp_path, "known", TRAIN, "HuggingFaceTB/SmolLM2-135M") / "run")
    assert record.outcome.kind == "ok", record.outcome
    assert record.ranks[0].num_steps == 3
    assert [one.kind for one in record.replaced] == ["config", "weights", "tokenizer"]
    folder = run(tmp_path, "unknown", TRAIN, "HuggingFaceTB/SmolLM2-136M")
    record = analyse(folder / "run")
    assert told(folder)["exit_status"] == 1
    assert "HuggingFaceTB/SmolLM2-135M" in " ".join(record.warnings)
    assert "knows no model 'HuggingFaceTB/SmolLM2-136M'" in capfd.readouterr().err


def test_a_dataset_that_is_not_there_has_rows_and_one_that_is_stays(tmp_path: Path, capfd) -> None:
    python = require_emulation()
    if not list(python.parents[1].glob("lib/python3*/site-packages/datasets")):
        pytest.skip("the emulated environment has no datasets: vramprobe emulate setup")
    (tmp_path / "mine.jsonl").write_text('{"text": "mine"}\n')
    folder = run(tmp_path, "data", ROWS, str(tmp_path / "mine.jsonl"), seq_len=8)
    assert json.loads(capfd.readouterr().out) == {
        "pictures": [["PIL", 640, 480]] * 4,
        "videos": ["gray-16x640x480.avi"] * 2,
        "nli": {
            "pair": ["anchor", "positive"],
            "triplet": ["anchor", "positive", "negative"],
            "pair-class": ["premise", "hypothesis", "label"],
        },
        "guessed": [["anchor", "positive"], ["messages", "images"]],
        "splits": ["test", "train"],
        "columns": ["messages"],
        "num_rows": 512,
        "one_split": ["instruction", "input"],
        "streamed": "a a a a a a a a",
        "mine": ["mine"],
        "refused": "FileNotFoundError",
        "asked": ["LocalEntryNotFoundError"],
        "is_tracked": False,
    }
    said = {one["what"]: one["by"] for one in replaced(folder / "run")}
    assert {"trl-lib/Capybara", "org/alpaca-de", "org/data", "org/my-nli"} < set(said)
    assert said["org/my-videos"].endswith(
        "one video of 16 frames of 640 × 480 pixels a row (--video-size), by its path"
    )
    assert said["org/my-llava"].endswith("one image of 640 × 480 pixels a row (--image-size)")
    assert "known for: messages" in said["trl-lib/Capybara"]
    assert "512 rows of 8 tokens, guessed columns: text" in said["org/data"]


@pytest.mark.parametrize(
    ("length", "train", "other"), [(8, 512, 64), (16_384, 512, 64), (65_536, 128, 16), (131_072, 64, 8), (2**20, 64, 8)]
)
def test_long_rows_are_few_because_a_program_tokenizes_all_before_its_first_step(length, train, other, empty) -> None:
    counts = [empty.rows.num_rows(most, length) for most in (empty.rows.NUM_ROWS, empty.rows.NUM_OTHER_ROWS)]
    assert counts == [train, other]


@pytest.mark.parametrize(("device", "is_plain"), [("cpu", False), ("meta", True)])
def test_added_rows_of_an_embedding_on_the_host_are_zeros_without_a_covariance(device, is_plain, empty) -> None:
    torch, called = pytest.importorskip("torch"), []

    class PreTrainedModel:
        def _init_added_embeddings_weights_with_mean(self, *words):
            called.append(words[2:])

    empty.loading.serve_added_rows(types.SimpleNamespace(PreTrainedModel=PreTrainedModel), None)
    old, new = (torch.nn.Embedding(rows, 4, device=device) for rows in (8, 10))
    torch.nn.init.ones_(new.weight)
    PreTrainedModel()._init_added_embeddings_weights_with_mean(old, new, 8, 2)
    assert called == ([(8, 2)] if is_plain else [])
    assert is_plain or new.weight.sum(1).tolist() == [4.0] * 8 + [0.0] * 2


@pytest.mark.parametrize(
    ("release", "dtype", "options", "said"),
    [
        ("5.23.0", "bfloat16", {}, "bfloat16: none was given to from_pretrained, and this is that of the weights"),
        (
            "4.57.1",
            "float32",
            {},
            "float32: none was given to from_pretrained, and this is the default of transformers 4",
        ),
        ("5.23.0", "float32", {}, None),
        ("4.57.1", "bfloat16", {"torch_dtype": "auto"}, None),
        ("5.23.0", "bfloat16", {"dtype": "bfloat16"}, None),
        ("5.23.0", "float16", {"quantization_config": {}}, None),
    ],
)
def test_a_dtype_that_nobody_gave_is_said_where_releases_differ(
    release, dtype, options, said, empty, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=release))

    class PreTrainedModel:
        @classmethod
        def from_pretrained(cls, name, **options):
            return types.SimpleNamespace(dtype=f"torch.{dtype}")

    found, _ = repositories(empty, tmp_path, tmp_path / "cache")
    run = empty.replacements.Replacements(str(tmp_path), {}, found)
    empty.loading.serve_folders(types.SimpleNamespace(PreTrainedModel=PreTrainedModel), run, "PreTrainedModel")
    PreTrainedModel.from_pretrained("org/name", **options)
    lines = [one for one in replaced(tmp_path) if one["kind"] == "loaded dtype"]
    assert [(one["what"], one["by"][: len(said or "")]) for one in lines] == ([("org/name", said)] if said else [])
    assert all(Replaced(**one) for one in lines)


def test_an_empty_model_is_not_partitioned_for_a_program_that_uses_zero3(empty, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    deepspeed, seen = pytest.importorskip("transformers.integrations.deepspeed"), []

    class Settings:
        def is_zero3(self) -> bool:
            return True

    settings = Settings()
    monkeypatch.setattr(transformers, "Probe", lambda config: seen.append(is_zero3()), raising=False)
    is_zero3 = deepspeed.is_deepspeed_zero3_enabled
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        empty.checkpoint.model_of(types.SimpleNamespace(architectures=["Probe"]))
        assert (seen, is_zero3()) == ([False], True)
    finally:
        deepspeed.unset_hf_deepspeed_config()


@exhaustive
def test_without_the_option_the_error_is_the_command_s_own_and_a_line_names_it(tmp_path: Path, monkeypatch) -> None:
    require_emulation()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = tmp_path / "script.py"
    script.write_text(TRAIN)
    words = ["profile", "--emulate", "RTX-4090", "--", "python", str(script), "org/nothing"]
    done = CliRunner().invoke(verbs.app, words)
    assert done.exit_code == 1
    assert "with --empty-weights an emulated card needs neither" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--empty-weights"], "add --emulate GPU"),
        (["--emulate", "RTX-4090", "--seq-len", "64"], "--seq-len 64"),
        (["--emulate", "RTX-4090", "--image-size", "64x64"], "--image-size 64x64"),
        (["--emulate", "RTX-4090", "--empty-weights", "--image-size", "64"], "give WIDTHxHEIGHT"),
        (["--emulate", "RTX-4090", "--video-size", "2x64x64"], "--video-size 2x64x64"),
        (["--emulate", "RTX-4090", "--empty-weights", "--video-size", "64x64"], "give FRAMESxWIDTHxHEIGHT"),
        (["--seq-len", "64"], "--seq-len 64"),
    ],
)
def test_combinations_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(verbs.app, ["profile", *words, "--", "python", "x.py"])
    assert isinstance(done.exception, SpecError)
    assert said in str(done.exception)


def test_a_tied_head_is_not_saved_where_it_is_not_tied_yet(empty) -> None:
    """As transformers 5.0.0 makes a model without memory: the head is a tensor of its own, to be tied on loading."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.Qwen3Config(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=512, tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = empty.checkpoint.model_of(config)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(512, 64, device="meta"))
    names = empty.checkpoint._saved(model)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    config.tie_word_embeddings = False
    assert "lm_head.weight" in empty.checkpoint._saved(empty.checkpoint.model_of(config))


def test_a_kernel_of_the_hub_that_is_not_there_is_said_and_the_program_sees_its_exception(
    empty, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def get_kernel(repo_id, revision=None):
        if repo_id != "kernels-community/there":
            raise OSError("offline mode is enabled")
        return "a kernel"

    module = types.SimpleNamespace(get_kernel=get_kernel)
    empty.downloads.serve_kernels(module, empty.replacements.Replacements(str(tmp_path)))
    assert module.get_kernel("kernels-community/there") == "a kernel"
    assert replaced(tmp_path) == []
    with pytest.raises(OSError, match="offline mode"):
        module.get_kernel("varunneal/flash-attention-3", revision="v1")
    (line,) = replaced(tmp_path)
    assert line["kind"] == "missing"
    assert "varunneal/flash-attention-3" in line["what"]
    assert "offline" in capsys.readouterr().err
