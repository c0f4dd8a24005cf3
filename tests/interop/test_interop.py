"""transformers', TRL's and peft's own objects → the cell that they mean; every field of theirs has a place."""

import dataclasses
import importlib
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import vramprobe
import vramprobe.api
from vramprobe import catalog
from vramprobe.errors import SpecError, UnknownName
from vramprobe.interop import adapters, arguments
from vramprobe.interop.models import read_model
from vramprobe.interop.questions import words_of
from vramprobe.interop.training_file import read_training_file
from vramprobe.resolve import option_names

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
RUNS = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "runs"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA_8B = {"model": "llama-3.1-8b", "batch_size": 2, "seq_len": 2048, "gpu": "RTX-4090"}


def training_arguments(**given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FutureWarnings of transformers' own aliases
        return transformers.TrainingArguments(output_dir="out", report_to=[], use_cpu=True, **given)


def llama_config(slug: str = "llama-3.1-8b") -> Any:
    return transformers.LlamaConfig(**catalog.find_model(slug).config)


def tiny_model() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def options_of(model: Any, args: Any = None, peft_config: Any = None, **options: Any) -> dict[str, Any]:
    return words_of(model, args, peft_config, {"seq_len": 128} | options).options


def test_a_verb_of_the_package_is_the_one_of_the_api_with_its_verdict() -> None:
    words = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 1024, "gpu": "RTX-4090"}
    found = vramprobe.api.predict(**words)
    assert found == vramprobe.predict(**words)
    assert (found.verdict.verdict, found.verdict.gpu) == ("fits", "GeForce RTX 4090")
    for verb in ("diff", "explain", "predict", "profile", "recommend", "techniques"):
        own, of_api = getattr(vramprobe, verb), getattr(vramprobe.api, verb)
        assert inspect.signature(own) == inspect.signature(of_api), verb


@pytest.mark.parametrize(("method", "autocast"), [("full", "none"), ("lora", "bf16")])  # whose recipes ship
def test_a_config_and_arguments_are_predicted_as_the_same_cell_in_words(method: str, autocast: str) -> None:
    args = training_arguments(per_device_train_batch_size=2, bf16=autocast == "bf16", gradient_checkpointing=True)
    adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if method == "lora" else None
    found = vramprobe.predict(llama_config(), args, adapter, gpu="RTX-4090", seq_len=2048, dtype="bf16")
    words = {"method": method, "gradient_checkpointing": True, "autocast": autocast}
    wanted = vramprobe.predict(**LLAMA_8B, **words)
    for name in ("peak_allocated_bytes", "reserved_bytes", "terms", "verdict"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert set(found.options) <= set(option_names())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"per_device_train_batch_size": 3}, {"batch_size": 3}),
        ({"gradient_accumulation_steps": 4}, {"grad_accum": 4}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"bf16": True}, {"autocast": "bf16"}),
        ({}, {"autocast": "none", "optim": "adamw_torch_fused", "gradient_checkpointing": False, "method": "full"}),
        ({"optim": "paged_adamw_8bit"}, {"optim": "paged_adamw_8bit"}),
        ({"use_liger_kernel": True}, {"fused_linear_cross_entropy": True}),
        ({"torch_compile": True}, {"torch_compile": True}),
    ],
)
def test_arguments_are_the_options_that_they_decide(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = options_of("llama-3.1-8b", training_arguments(**given))
    assert wanted.items() <= found.items()


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"zero_optimization": {"stage": 2}}, {"sharding": "zero2"}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"sharding": "zero3", "offload": "params"},
        ),
        ({"zero_optimization": {"stage": 0}}, {"sharding": "ddp"}),
    ],
)
def test_deepspeed_as_a_dict_and_as_a_file(config: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(config))
    for given in (config, str(file)):
        found = options_of("llama-3.1-8b", {"per_device_train_batch_size": 1, "deepspeed": given}, num_gpus=4)
        assert (wanted | {"num_gpus": 4}).items() <= found.items()


@pytest.mark.parametrize(
    ("fsdp", "config", "sharding"),
    [
        (True, {}, "fsdp"),
        ("full_shard auto_wrap", {"version": 1}, "fsdp1"),
        (True, {"fsdp_reshard_after_forward": False}, "fsdp-shard-grad-op"),
        (["hybrid_shard"], {"version": 2}, "fsdp-hybrid"),
    ],
)
def test_fsdp(fsdp: Any, config: dict[str, Any], sharding: str) -> None:
    args = {"per_device_train_batch_size": 1, "fsdp": fsdp, "fsdp_config": config}
    assert options_of("llama-3.1-8b", args, num_gpus=8)["sharding"] == sharding


def test_several_gpus_without_sharding_are_ddp() -> None:
    assert options_of("llama-3.1-8b", training_arguments(), num_gpus=2)["sharding"] == "ddp"


@pytest.mark.parametrize(("module", "kind"), [(arguments, transformers.TrainingArguments), (adapters, peft.LoraConfig)])
def test_every_field_has_one_place(module: Any, kind: type) -> None:
    tables = (module.OPTION_OF, module.READ, module.HARMLESS, module.NAMED, module.REFUSED)
    everywhere = [name for table in tables for name in table]
    assert sorted(everywhere) == sorted(set(everywhere))
    fields = {field.name for field in dataclasses.fields(kind) if field.init or module is adapters} - {"runtime_config"}
    assert fields - set(everywhere) == set()


@pytest.mark.parametrize(("name", "trainer"), arguments.TRAINER_OF.items())
def test_every_field_of_trls_configurations_has_a_place(name: str, trainer: str) -> None:
    pytest.importorskip("trl")
    module = importlib.import_module("trl.experimental.orpo" if trainer == "orpo" else "trl")
    kind = getattr(module, name)
    everywhere = {
        *arguments.OPTION_OF, *arguments.READ, *arguments.HARMLESS, *arguments.NAMED, *arguments.REFUSED
    }  # fmt: skip
    assert {one.name for one in dataclasses.fields(kind) if one.init} <= everywhere
    args = kind(output_dir="out", report_to=[], use_cpu=True, max_length=512)
    found = options_of("llama-3.1-8b", args, seq_len=512)
    assert (found["trainer"], found["autocast"], found["dtype"]) == (trainer, "bf16", "fp32")


@pytest.mark.parametrize("name", arguments.NAMED)
def test_a_field_that_is_not_counted_is_named(name: str) -> None:
    value = {"split_batches": True} if name == "accelerator_config" else "steps"
    args = {"per_device_train_batch_size": 1, name: value}
    assert any(name in note for note in arguments.read_arguments(args).notes)


@pytest.mark.parametrize("name", arguments.REFUSED)
def test_a_field_whose_memory_would_be_missing_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        arguments.read_arguments({"per_device_train_batch_size": 1, name: 0.1})


def test_a_field_that_nobody_knows_is_named_where_it_is_set() -> None:
    assert any("new_switch" in note for note in arguments.read_arguments({"new_switch": 7}).notes)
    assert not arguments.read_arguments({"new_switch": None}).notes


def test_default_arguments_have_no_notes() -> None:
    args = {name: value for name, value in training_arguments().to_dict().items() if name != "use_cpu"}
    assert arguments.read_arguments(args).notes == ()


@pytest.mark.parametrize("name", adapters.REFUSED)
def test_an_adapter_whose_memory_would_be_missing_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        adapters.read_adapter({"peft_type": "LORA", "r": 8, name: ["lm_head"]}, "llama")


def test_an_adapter_has_pefts_own_targets_unless_it_names_some() -> None:
    read = adapters.read_adapter
    assert read(peft.LoraConfig(), "llama").options["lora_targets"] == "q_proj,v_proj"
    named = read(peft.LoraConfig(target_modules=["up_proj", "k_proj"]), "llama").options["lora_targets"]
    assert named == "k_proj,up_proj"
    with pytest.raises(SpecError, match="no default for granite"):
        read(peft.LoraConfig(), "granite")
    with pytest.raises(SpecError, match="pattern"):
        read(peft.LoraConfig(target_modules=r".*\.q_proj"), "llama")


def test_a_model_says_its_dtype_its_attention_and_its_checkpointing() -> None:
    model = tiny_model().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
    found = options_of(model, training_arguments(per_device_train_batch_size=1))
    assert found["dtype"] == "bf16"
    assert found["attn"] == "sdpa"
    assert found["gradient_checkpointing"] is True
    assert found["model"]["hidden_size"] == 64


def test_a_peft_model_is_predicted_with_its_adapter() -> None:
    args = training_arguments(per_device_train_batch_size=1, bf16=True)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own use of what transformers renames
        model = peft.get_peft_model(tiny_model().bfloat16(), adapter)
    found = vramprobe.predict(model, args, seq_len=128)
    wanted = vramprobe.predict(tiny_model().bfloat16(), args, adapter, seq_len=128)
    assert found.options["method"] == "lora"
    assert found.options["lora_dtype"] == "fp32"
    assert found.peak_allocated_bytes == wanted.peak_allocated_bytes


def test_an_adapter_config_and_its_dict_name_their_base(tmp_path: Path) -> None:
    peft.LoraConfig(r=8, target_modules=["q_proj"], base_model_name_or_path="llama-3.1-8b").save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    for given in (str(tmp_path), file, json.loads(file.read_text())):
        found = options_of(given, {"per_device_train_batch_size": 1})
        assert (found["method"], found["lora_r"], found["lora_targets"]) == ("lora", 8, "q_proj")


def test_bitsandbytes_quantization_is_an_option() -> None:
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert arguments.quantization(four) == {"quant": "nf4-single"}
    double = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    assert arguments.quantization(double) == {"quant": "nf4"}
    assert arguments.quantization({"load_in_8bit": True}) == {"quant": "int8"}
    config = llama_config().to_dict() | {"quantization_config": double}
    assert options_of(config, training_arguments(bf16=True), peft.LoraConfig())["method"] == "qlora"
    with pytest.raises(SpecError, match="gptq"):
        arguments.quantization({"quant_method": "gptq"})


@pytest.mark.parametrize(
    ("file", "emulated_bytes", "share"),
    [("axolotl.yaml", 10_131_264_512, 0.01), ("llamafactory.yaml", 7_806_470_656, 0.02)],
)
def test_a_framework_s_file_is_predicted_as_its_emulated_run_was(file: str, emulated_bytes: int, share: float) -> None:
    """benchmarks/frameworks/frameworks.csv: both ran with these files; LLaMA-Factory's rows had 484 tokens there."""
    found = vramprobe.predict(RUNS / file, gpu="RTX-4090", **({"seq_len": 484} if "llama" in file else {}))
    assert found.peak_allocated_bytes.value == pytest.approx(emulated_bytes, rel=share)


def test_a_key_of_a_framework_that_nobody_knows_is_named(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text((RUNS / "axolotl.yaml").read_text() + "new_trick: true\n")
    assert any("new_trick" in note for note in words_of(str(file), None, None, {}).notes)
    for name in ("axolotl", "llamafactory"):
        assert "not known" not in " ".join(words_of(str(RUNS / f"{name}.yaml"), None, None, {}).notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read"),
        ("- 1", "neither base_model"),
        ("base_model: x\nadapter: llama-adapter", "llama-adapter"),
        ("base_model: x\nrl: grpo", "grpo"),
        ("model_name_or_path: x\nfinetuning_type: oft", "oft"),
        ("model_name_or_path: x\nuse_galore: true", "use_galore"),
        ("model_name_or_path: x\nquantization_bit: 3", "quantization_bit 3"),
        ("model_name_or_path: x\nstage: ppo", "ppo"),
    ],
)
def test_a_file_that_is_not_predicted_says_why(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=says):
        read_training_file(str(file))


class NoModel:
    """An object of nobody's."""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((NoModel(),), "NoModel given"),
        ((NoModel,), "type given"),
        ((7,), "int given"),
        (({"a": 1},), "no model_type"),
        (("llama-3.1-8b", NoModel()), "args: NoModel"),
        (("llama-3.1-8b", {"bf16": True, "fp16": True}), "bf16 and args.fp16"),
        (("llama-3.1-8b", {}, NoModel()), "peft_config: NoModel"),
        (("llama-3.1-8b", {}, {"peft_type": "IA3"}), "IA3"),
        (({"peft_type": "LORA", "base_model_name_or_path": "gpt2"}, {}, {"peft_type": "LORA"}), "adapter already"),
        (("llama-3.1-8b", {"deepspeed": {"zero_optimization": {"stage": 3}}}), "num_gpus"),
        (("llama-3.1-8b", {"deepspeed": "nowhere.json"}), "cannot be read"),
        (("llama-3.1-8b", {"deepspeed": {}, "fsdp": True} | {"deepspeed": {"a": 1}}), "both set"),
        ((None, {}), "none given"),
        ((str(RUNS / "axolotl.yaml"), {}), "drop args"),
    ],
)
def test_what_cannot_be_is_one_value_error_of_ours(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        vramprobe.predict(*given, seq_len=128)
    assert isinstance(error.value, SpecError)


def test_objects_without_an_adapter_leave_the_method_to_the_option() -> None:
    config = {"model_type": "gpt2"}
    assert options_of(config, seq_len=128)["method"] == "full"
    assert options_of(config, seq_len=128, method="qlora")["method"] == "qlora"
    assert options_of("gpt2", {"bf16": True}, seq_len=128, method="lora")["method"] == "lora"
    with pytest.raises(SpecError, match="method='full' beside 'lora'"):
        options_of("gpt2", {}, {"peft_type": "LORA"}, seq_len=128, method="full")


def test_an_option_beside_the_object_that_says_another_is_refused() -> None:
    args = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1}
    with pytest.raises(SpecError, match="batch_size=4 beside 2"):
        vramprobe.predict("llama-3.1-8b", args, seq_len=128, batch_size=4)
    assert options_of("llama-3.1-8b", args, batch_size=2)["batch_size"] == 2
    with pytest.raises(SpecError, match="seq_len: missing"):
        vramprobe.predict("llama-3.1-8b", args)
    with pytest.raises(UnknownName, match="RTX-40900"):
        vramprobe.predict("llama-3.1-8b", args, seq_len=128, gpu="RTX-40900")


def test_a_model_without_a_config_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(SpecError, match="no transformers config"):
        read_model(torch.nn.Linear(2, 2))


def test_recommend_and_techniques_take_the_same_objects() -> None:
    args = training_arguments(per_device_train_batch_size=2, gradient_accumulation_steps=8, bf16=True)
    adapter = peft.LoraConfig(target_modules="all-linear")
    card = {"gpus": ["A100-80GB-SXM"], "max_gpus": 1}
    found = vramprobe.recommend("llama-3.2-1b", args, adapter, seq_len=1024, tokens="1M", **card)
    setting = found.options[0].setting
    assert setting.batch_size * setting.grad_accum == 16
    ranking = vramprobe.techniques("llama-3.2-1b", args, adapter, seq_len=1024, gpu="RTX-4090")
    assert "gradient_checkpointing" in [one.technique for one in ranking.ranked]
    with pytest.raises(SpecError, match="give gpu"):
        vramprobe.techniques("llama-3.1-8b", args, seq_len=1024)


def test_weights_that_a_gpu_with_the_hosts_memory_cannot_hold_twice_are_a_note() -> None:
    """A DGX Spark fills up while loading: the file is read into the memory that the GPU has, too."""
    cell = {"method": "lora", "batch_size": 1, "seq_len": 1024}  # whose recipes ship
    notes = [
        [one for one in vramprobe.predict(model, gpu=gpu, **cell).warnings if "loading may not fit" in one]
        for model, gpu in (("qwen2.5-32b", "GB10"), ("qwen2.5-7b", "GB10"), ("qwen2.5-32b", "H200"))
    ]
    assert [len(found) for found in notes] == [1, 0, 0]
    assert "61.53 GiB of weights" in notes[0][0]
