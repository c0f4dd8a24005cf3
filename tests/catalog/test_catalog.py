"""Models, GPUs, prices and claims: every shipped row can be used, every kind of name resolves, every miss helps."""

import csv
import importlib
import json
import sys
import threading
import tomllib
from pathlib import Path

import huggingface_hub
import pytest
from factories import TINY_LLAMA, TINY_LLAMA_PATH
from huggingface_hub import errors as hub_errors

from vramprobe import catalog
from vramprobe.catalog import hub_config
from vramprobe.catalog.claims import list_claims
from vramprobe.catalog.gpus import _gpu_words
from vramprobe.catalog.names import nearest_names
from vramprobe.errors import MissingDependency, SpecError, UnknownName
from vramprobe.resolve import resolve

NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text())
DATA = Path(catalog.__file__).parents[1] / "data"


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / "models" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Models


def test_every_architecture_file_has_a_verified_row_and_the_reverse() -> None:
    files = {path.stem for path in (DATA / "models").glob("*.json")}
    models = catalog.list_models()
    assert {model.name for model in models} == files
    assert len(models) == 167
    for model in models:
        assert model.n_params > model.n_embedding_params > 0
        assert model.origin == "catalog"
        assert model.checkpoint == model.hf_id


@pytest.mark.parametrize("name", ["llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/llama-3.1-8b"])
def test_slug_and_hub_id_find_the_shipped_entry(name: str) -> None:
    entry = catalog.find_model(name)
    assert (entry.name, entry.hf_id, entry.model_type) == ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "llama")
    assert entry.n_params == 8030261248


@pytest.mark.parametrize(
    ("given", "images", "expected"),
    [
        ("qwen3.5-9b", 1, "qwen3.5-9b-vl"),
        ("Qwen/Qwen3.5-9B", 2, "qwen3.5-9b-vl"),
        ("unsloth/Qwen3.5-9B", 1, "qwen3.5-9b-vl"),
        ("gemma-3-4b", 1, "gemma-3-4b-it"),
        ("qwen3.5-9b", 0, "qwen3.5-9b"),
        ("google/gemma-4-E4B-it", 0, "gemma-4-e4b-it"),
    ],
)
def test_a_model_that_is_given_images_has_its_tower(given: str, images: int, expected: str, caplog) -> None:
    caplog.set_level("INFO")
    words = {"method": "lora", "batch_size": 1, "seq_len": 64, "device": "cuda"}
    found = resolve(model=given, **words, **({"images": images} if images else {}))
    assert found.model == expected
    assert ("with its vision tower" in caplog.text) == (images > 0 or given.startswith("Qwen/"))


def test_a_hub_id_whose_tower_is_left_out_names_the_model_that_has_it(caplog) -> None:
    caplog.set_level("INFO")
    resolve(model="Qwen/Qwen3.5-9B", method="lora", batch_size=1, seq_len=64, device="cuda")
    assert "the language model alone; with its vision tower, as trainers load it: qwen3.5-9b-vl" in caplog.text


def test_a_caller_cannot_change_the_catalog() -> None:
    catalog.find_model("gpt2").config["n_layer"] = 1
    assert catalog.find_model("gpt2").config["n_layer"] == 12


def test_config_file_and_its_folder_are_the_same_model() -> None:
    folder = catalog.find_model(str(TINY_LLAMA_PATH))
    file = catalog.find_model(str(TINY_LLAMA_PATH / "config.json"))
    assert folder == file
    assert folder.config == TINY_LLAMA
    assert (folder.origin, folder.name, folder.hf_id) == ("path", str(TINY_LLAMA_PATH), None)
    assert folder.checkpoint == str(TINY_LLAMA_PATH)
    assert catalog.find_model(folder.name) == folder


def test_a_json_file_of_another_name_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(TINY_LLAMA))
    monkeypatch.chdir(tmp_path)
    entry = catalog.find_model("./mine.json")
    assert entry.name == str(tmp_path / "mine.json")  # absolute: the worker may run elsewhere
    assert entry.checkpoint == str(tmp_path)


def test_a_slug_wins_over_a_folder_and_dot_slash_names_the_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY_LLAMA))
    monkeypatch.chdir(tmp_path)
    assert catalog.find_model("gpt2").origin == "catalog"
    assert catalog.find_model("./gpt2").model_type == "llama"


def test_two_copies_of_one_architecture_resolve_alike_and_remote_code_needs_trust(tmp_path: Path) -> None:
    noise = {"_name_or_path": "somewhere", "transformers_version": "4.1", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | noise))
    assert catalog.find_model(str(tmp_path)).config == TINY_LLAMA
    trusted = catalog.find_model(str(tmp_path), trust_remote_code=True)
    assert trusted.config == TINY_LLAMA | {"auto_map": noise["auto_map"]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"hidden_size": 64}', "no model_type"),
        ("[1]", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ('{\n"model_type": "llama",\n}', "not valid JSON (line 3"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecError) as caught:
        catalog.find_model(str(file))
    assert complaint in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no config\.json"):
        catalog.find_model(str(tmp_path))


def test_an_adapter_has_the_shape_of_the_model_that_it_names(tmp_path: Path, caplog) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B-Base"}))
    with caplog.at_level("INFO", logger="vramprobe"):
        for given in (tmp_path, tmp_path / "adapter_config.json"):
            assert catalog.find_model(str(given)).config == catalog.find_model("qwen3-8b").config
    assert "an adapter of Qwen/Qwen3-8B-Base" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"base_model_name_or_path": "."}'])
def test_an_adapter_that_names_no_model_says_so(tmp_path: Path, content: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(SpecError, match="names no base_model_name_or_path"):
        catalog.find_model(".")


def test_an_adapter_of_the_hub_has_the_shape_of_the_model_that_it_names(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))

    def download(repo: str, name: str, **options: object) -> str:
        if options.get("local_files_only"):
            raise hub_errors.LocalEntryNotFoundError("not cached")
        assert name == file.name
        return str(file)

    def head(url: str, **_: object) -> None:
        if url.endswith("/config.json"):
            raise hub_errors.EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert catalog.find_model("me/my-tune").name == "qwen3-8b"


def test_a_name_that_is_like_none_has_no_nearest() -> None:
    """An image model and an encoder that are not known: helium-1-preview-2b and gemma-3-4b would be wrong hints."""
    known = [entry.name for entry in catalog.list_models()]
    for name in ("black-forest-labs/FLUX.1-dev", "BAAI/bge-m3"):
        assert nearest_names(name, known) == []
    assert nearest_names("tinylama", ["tinyllama-1.1b", "gpt2"]) == ["tinyllama-1.1b"]


def test_unknown_slug_gives_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown model 'lama-3-8b'.*llama-3-8b.*vramprobe models"):
        catalog.find_model("lama-3-8b")
    with pytest.raises(UnknownName, match=r"Nearest: qwen2\.5-vl-3b, qwen2-vl-"):
        catalog.find_model("qwen2-vl-3b")


@pytest.mark.parametrize(("name", "slug"), NAMES["models"].items())
def test_names_that_people_type_have_the_shape_that_they_share(name: str, slug: str, caplog) -> None:
    with caplog.at_level("INFO", logger="vramprobe"):
        entry = catalog.find_model(name)
    assert entry.config == catalog.find_model(slug).config
    assert entry.name == (name if "/" in name else slug)
    assert f"{name}: same shape as {slug}" in caplog.text
    assert catalog.find_model(entry.name) == entry


def test_every_own_name_is_its_own_shape_and_none_is_said(caplog) -> None:
    with caplog.at_level("INFO", logger="vramprobe"):
        for entry in catalog.list_models():
            for name in (entry.name, entry.hf_id, entry.hf_id.upper()):
                assert catalog.find_model(name) == entry
    assert caplog.text == ""


@pytest.mark.parametrize("entry", catalog.list_models(), ids=lambda entry: entry.name)
def test_an_instruct_mirror_of_each_model_has_its_shape(entry: catalog.ModelEntry) -> None:
    """None is taken for another of the catalog: but for text models whose tuned id is the one with images."""
    found = catalog.find_model(f"unsloth/{entry.hf_id.rpartition('/')[2]}-Instruct-bnb-4bit")
    assert found.config.get("text_config", found.config) == entry.config or "vision_config" in found.config


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-VL-72B-Instruct", "mistralai/Mistral-Small-Instruct-2409", "zai-org/GLM-4-9B-Chat-1M",
     "me/llama-3.1-8b-vision", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"],
)  # fmt: skip
def test_a_name_of_another_shape_is_not_taken_for_one_that_is_known(name: str) -> None:
    with pytest.raises(MissingDependency, match="HF_HUB_OFFLINE"):
        catalog.find_model(name)


@pytest.mark.parametrize("row", _rows("SAME_SHAPE.csv"), ids=lambda row: row["hf_id"])
def test_ids_that_share_a_shape_name_a_model_of_the_catalog(row: dict[str, str], caplog) -> None:
    with caplog.at_level("INFO", logger="vramprobe"):
        assert catalog.find_model(row["hf_id"]).config == catalog.find_model(row["slug"]).config
    assert f"same shape as {row['slug']}" in caplog.text
    assert row["source"]


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/config.json", "nowhere.json", "~/no/such/folder"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(UnknownName, match="No file or folder is there"):
        catalog.find_model(name)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    with pytest.raises(UnknownName, match="vramprobe models"):
        catalog.find_model(name)


# The hub, which no test ever asks


def test_hub_offline_says_what_to_do() -> None:
    with pytest.raises(MissingDependency, match=r"HF_HUB_OFFLINE is set\. Unset HF_HUB_OFFLINE.*vramprobe models"):
        catalog.find_model("some-org/some-model")


def test_hub_config_is_used_from_the_cache_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file, **_: str(TINY_LLAMA_PATH / file))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", None)
    entry = catalog.find_model("some-org/some-model")
    assert (entry.name, entry.hf_id, entry.origin) == ("some-org/some-model", "some-org/some-model", "hub")
    assert (entry.config, entry.n_params) == (TINY_LLAMA, None)


def test_the_hub_is_asked_once_and_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is resolved and no connection opened: the HTTP client's own requests are counted."""
    asked = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def answer(self, request):
        asked.append((request.method, request.extensions["timeout"]["connect"]))
        raise client.ConnectError("no route")

    session = huggingface_hub.utils.get_session()
    client = importlib.import_module(type(session).__module__.partition(".")[0])
    monkeypatch.setattr(client.HTTPTransport, "handle_request", answer)
    with pytest.raises(MissingDependency, match=r"unreachable \(.*no route\).*Nearest: .*vramprobe models"):
        catalog.find_model("some-org/llama-9b")
    assert asked == [("HEAD", 3.0)]


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def head(*_: object, **__: object) -> None:
        answers.wait(3)  # as socket.getaddrinfo does, whatever the timeout of the request

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_config, "_SECONDS", 0.05)
    with pytest.raises(MissingDependency, match=r"the hub is unreachable \(no answer in 0\.05 s\).*Nearest: .*gpt2"):
        catalog.find_model("some-org/gpt2-mini")
    answers.set()


def test_hub_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"needs the package huggingface_hub.*pip install"):
        catalog.find_model("some-org/some-model")


class _Response:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


@pytest.mark.parametrize(
    ("raised", "kind", "complaint"),
    [
        (
            hub_errors.GatedRepoError("403", response=_Response()),
            MissingDependency,
            "gated on the hub: accept its terms",
        ),
        (hub_errors.RepositoryNotFoundError("404", response=_Response()), UnknownName, "no such repository"),
        (hub_errors.LocalEntryNotFoundError("no connection"), MissingDependency, "the hub is unreachable"),
        (hub_errors.EntryNotFoundError("404"), UnknownName, "no config.json"),
        (hub_errors.OfflineModeIsEnabled("offline"), MissingDependency, "the hub is unreachable (offline)"),
        (TimeoutError("read timed out"), MissingDependency, "read timed out"),
    ],
)
def test_each_way_the_hub_can_fail(monkeypatch, raised: Exception, kind: type[Exception], complaint: str) -> None:
    def fail(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(kind) as caught:
        catalog.find_model("some-org/some-model")
    assert complaint in str(caught.value)
    assert "vramprobe models" in str(caught.value)


# Depth cuts (that the cut configs build is in test_catalog_instantiates.py)


@pytest.mark.parametrize(
    ("slug", "expected"),
    [
        ("llama-3.1-8b", {"num_hidden_layers": 2}),
        ("gpt2", {"n_layer": 2}),
        ("bloomz-560m", {"n_layer": 2}),
        ("t5-small", {"num_layers": 2, "num_decoder_layers": 2}),
        ("gpt-oss-20b", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_cut_depth_changes_the_depth_and_nothing_else(slug: str, expected: dict[str, object]) -> None:
    whole = catalog.find_model(slug).config
    cut = catalog.cut_depth(whole, 2)
    assert {key: value for key, value in cut.items() if whole[key] != value} == expected
    assert list(cut) == list(whole)
    assert whole == catalog.find_model(slug).config  # a new config, the old one untouched


def test_cut_depth_follows_lists_of_layer_indices_and_nested_text_configs() -> None:
    config = {"model_type": "x", "num_hidden_layers": 4, "mlp_only_layers": [0, 3], "no_rope_layers": [1, 1, 1, 0]}
    cut = {"model_type": "x", "num_hidden_layers": 2, "mlp_only_layers": [0], "no_rope_layers": [1, 1]}
    assert catalog.cut_depth(config, 2) == cut
    assert catalog.cut_depth({"model_type": "y", "text_config": config}, 2) == {"model_type": "y", "text_config": cut}


@pytest.mark.parametrize("num_layers", [-1, 0, 33])
def test_cut_depth_refuses_what_is_not_there(num_layers: int) -> None:
    with pytest.raises(SpecError, match=f"num_layers {num_layers} is not possible: this model has 32 layers"):
        catalog.cut_depth(catalog.find_model("llama-3.1-8b").config, num_layers)


def test_cut_depth_of_a_config_without_depth() -> None:
    with pytest.raises(SpecError, match="names no depth to cut"):
        catalog.cut_depth({"model_type": "mystery"}, 1)


# GPUs


def test_every_gpu_has_its_names() -> None:
    rows = list(csv.DictReader((DATA / "gpu_names.csv").read_text().splitlines()))
    assert [row["gpu"] for row in rows] == [gpu.name for gpu in catalog.list_gpus()]
    for gpu in catalog.list_gpus():
        for name in (gpu.name, gpu.short_name, *gpu.aliases):
            for spelling in (name, name.lower(), name.upper(), f"NVIDIA {name}", name.replace("-", " ")):
                assert catalog.find_gpu(spelling) is gpu


def test_no_two_gpus_share_a_name() -> None:
    names = [{gpu.name, gpu.short_name, *gpu.aliases} for gpu in catalog.list_gpus()]
    keys = [key for own in names for key in {"".join(_gpu_words(name)) for name in own}]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("given", "name"), NAMES["gpus"].items())
def test_gpu_names_in_the_wild(given: str, name: str) -> None:
    assert catalog.find_gpu(given).name == name


@pytest.mark.parametrize(
    ("given", "candidates"),
    [
        ("A100", ["A100-40GB-PCIe", "A100-40GB-SXM", "A100-80GB-PCIe", "A100-80GB-SXM"]),
        ("V100", ["V100-16GB-PCIe", "V100-16GB-SXM", "V100-32GB-PCIe", "V100-32GB-SXM"]),
        ("RTX PRO 6000", ["RTX-PRO-6000-WS", "RTX-PRO-6000-Server"]),
    ],
)
def test_an_ambiguous_gpu_lists_its_candidates(given: str, candidates: list[str]) -> None:
    with pytest.raises(UnknownName, match="fits several") as caught:
        catalog.find_gpu(given)
    for short_name in candidates:
        assert f"{short_name} (" in str(caught.value)
        assert catalog.find_gpu(short_name).short_name == short_name


@pytest.mark.parametrize("given", ["", "RTX 4075 Ti SUPER", "H100 96GB HBM2e", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_an_unknown_gpu_is_not_guessed(given: str) -> None:
    with pytest.raises(UnknownName, match="vramprobe gpus"):
        catalog.find_gpu(given)


def test_a_misspelt_gpu_gives_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Nearest: H100-SXM"):
        catalog.find_gpu("h100-smx")


@pytest.mark.parametrize(
    ("text", "total_bytes"), [("12GiB", 12 << 30), ("24564 MiB", 24564 << 20), ("16GB", 16 * 10**9)]
)
def test_a_size_is_a_gpu_of_that_memory_with_the_kernels_of_no_named_gpu(text: str, total_bytes: int) -> None:
    found = catalog.gpu_or_size(text)
    assert (found.total_bytes, found.is_size) == (total_bytes, True)
    assert catalog.gpu_or_size(found.short_name) == found
    with pytest.raises(SpecError, match=r"is a size of memory.*Give a GPU"):
        catalog.find_gpu(text)


@pytest.mark.parametrize(("text", "gib"), [("3g.40gb", 39.25), ("MIG 1g.10gb", 9.62), ("mig-1g.5gb", 4.75)])
def test_a_slice_of_a_gpu_is_a_size(text: str, gib: float) -> None:
    assert catalog.gpu_or_size(text).total_bytes == round(gib * 2**30)


def test_a_card_has_the_memory_of_its_name() -> None:
    for name, gib in {"RTX 3060": 12, "rtx3080": 10, "4060 Ti 16GB": 16, "2080ti": 11, "A5000": 24}.items():
        assert catalog.find_gpu(name).total_bytes == pytest.approx(gib * 2**30, rel=0.03)


def test_a_name_is_that_gpu_and_no_size() -> None:
    for gpu in catalog.list_gpus():
        assert catalog.gpu_or_size(gpu.short_name) == gpu
        assert not gpu.is_size
    with pytest.raises(UnknownName, match="a size such as 12GiB will do"):
        catalog.gpu_or_size("GTX-9999")


def test_gpu_memory_is_what_the_driver_reports() -> None:
    h200 = catalog.find_gpu("H200")
    assert (h200.total_bytes, h200.nominal_gb) == (143771 * 1024**2, 141)
    assert catalog.find_gpu("GH200-144GB").total_bytes is None  # nobody's output found: unknown, not 0
    assert catalog.find_gpu("T4").bf16_dense_tflops is None


# Prices and claims


def test_every_price_names_a_gpu() -> None:
    prices = catalog.list_prices()
    assert len(prices) == 94
    offers = [(one.provider, one.num_gpus, one.usd_per_hour) for one in catalog.list_prices("NVIDIA H100 80GB HBM3")]
    assert offers[3:6] == [("RunPod", 8, 21.52), ("Lambda", 1, 4.29), ("Lambda", 2, 8.38)]
    assert offers[-3:] == [("CoreWeave", 8, 49.24), ("CoreWeave", 8, 19.71), ("Spheron", 11, 55.77)]
    pod = next(price for price in prices if price.provider == "CoreWeave" and price.gpu.short_name == "H200")
    assert pod.usd_per_gpu_hour == pytest.approx(50.44 / 8)
    with pytest.raises(UnknownName):
        catalog.list_prices("H1000")


def test_every_claim_is_typed() -> None:
    claims = {claim.id: claim for claim in list_claims()}
    assert len(claims) == len(list_claims()) == 135
    named = [row for row in csv.DictReader((DATA / "claims.csv").read_text().splitlines()) if row["gpu"]]
    assert all(claims[row["id"]].gpus for row in named)
    assert {len(claim.gpus) for claim in claims.values()} == {0, 1, 2}  # "A100-80GB/H100-80GB" names two
    assert {len(claim.seq_lens) for claim in claims.values()} == {0, 1, 2}
    assert {claim.gradient_checkpointing for claim in claims.values()} == {None, True}
    assert (claims["L1-01"].low, claims["L1-01"].high, claims["L1-01"].unit) == (2.0, 2.0, "B/param")
    assert claims["L1-01"].method is None
