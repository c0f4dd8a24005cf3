"""The runs of run_phases.py: what each is typed as in a folder that has the files of phases/.

In: nothing. Out: RUNS, by name. ``before`` is run first, to its end, for the checkpoint or the adapter that the command
reads. ``environment`` names the libraries that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_EVALUATION = "--report_to none --max_steps 2 --save_steps 2 --output_dir before"
EVALUATES = "--report_to none --max_steps 900 --eval_strategy steps --eval_steps 300 --save_steps 300"
BEST = f"--per_device_eval_batch_size 2 {EVALUATES} --load_best_model_at_end --output_dir out"
RESUMES = f"{BEST} --resume_from_checkpoint before/checkpoint-2"
TRAIN = "train.py --bf16 --per_device_train_batch_size 2"
LAUNCH = "accelerate launch --config_file"
TRL = (
    "--model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name trl-lib/Capybara --dtype bfloat16 "
    "--max_length 1024 --per_device_train_batch_size 2"
)
SWIFT = (
    "swift sft --model HuggingFaceTB/SmolLM2-135M --use_hf true --model_type llama --template default "
    "--dataset data/rows.json --split_dataset_ratio 0.1 --torch_dtype bfloat16 --max_length 1024 "
    "--truncation_strategy right --per_device_train_batch_size 2 --gradient_accumulation_steps 1"
)
TORCHTUNE = (
    "dataset._component_=torchtune.datasets.alpaca_dataset dataset.source=json dataset.data_files=data/rows.json "
    "tokenizer.path=Llama-3.2-1B/tokenizer.model tokenizer.max_seq_len=1024 batch_size=2 "
    "checkpointer.checkpoint_dir=Llama-3.2-1B output_dir=out gradient_accumulation_steps=1"
)
CHECKPOINT = (
    "python ../../benchmarks/frameworks/runs/prepare.py ../../vramprobe/data/models/llama-3.2-1b.json Llama-3.2-1B "
    "one-file"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. ``is_empty``: it names a model and data that are not there (``--empty-weights``)."""

    command: str
    environment: str = "trl"
    num_gpus: int = 2
    before: str = ""

    @property
    def is_empty(self) -> bool:
        return self.command.split()[0] in ("trl", "llamafactory-cli", "axolotl", "swift")


def _resumed(launch: str, options: str, **more: int) -> Run:
    return Run(command=f"{launch} {options} {RESUMES}", before=f"{launch} {options} {NO_EVALUATION}", **more)


RUNS = {
    "Trainer, DDP": Run(command=f"torchrun --nproc_per_node 2 {TRAIN} {BEST}"),
    "Trainer, FSDP1, full state dict": Run(command=f"{LAUNCH} fsdp1-full.yaml {TRAIN} {BEST}"),
    "Trainer, FSDP1, sharded state dict": Run(command=f"{LAUNCH} fsdp1-sharded.yaml {TRAIN} {BEST}"),
    "Trainer, FSDP2, full state dict": Run(command=f"{LAUNCH} fsdp2-full.yaml {TRAIN} {BEST}"),
    "Trainer, FSDP2, sharded state dict": Run(command=f"{LAUNCH} fsdp2-sharded.yaml {TRAIN} {BEST}"),
    "Trainer, FSDP2, LoRA": Run(command=f"{LAUNCH} fsdp2-full.yaml {TRAIN} {BEST} --lora_r 16"),
    "Trainer, ZeRO-3, 16-bit gather": Run(command=f"deepspeed --num_gpus 2 {TRAIN} {BEST} --deepspeed zero3.json"),
    "Trainer, one GPU, resumed": _resumed("python", TRAIN, num_gpus=1),
    "Trainer, DDP, resumed": _resumed("torchrun --nproc_per_node 2", TRAIN),
    "Trainer, FSDP2, full state dict, resumed": _resumed(f"{LAUNCH} fsdp2-full.yaml", TRAIN),
    "Trainer, FSDP2, sharded state dict, resumed": _resumed(f"{LAUNCH} fsdp2-sharded.yaml", TRAIN),
    "Trainer, ZeRO-3, resumed": _resumed("deepspeed --num_gpus 2", f"{TRAIN} --deepspeed zero3.json"),
    "Trainer, one GPU, LoRA, merged": Run(command=f"python {TRAIN} {BEST} --lora_r 16 --merge", num_gpus=1),
    "Trainer, DDP, LoRA, merged": Run(command=f"torchrun --nproc_per_node 2 {TRAIN} {BEST} --lora_r 16 --merge"),
    "Trainer, one GPU": Run(command=f"python {TRAIN} {BEST}", num_gpus=1),
    "Trainer, one GPU, EMA": Run(command=f"python {TRAIN} {BEST} --ema", num_gpus=1),
    "TRL SFT, FSDP2": Run(command=f"trl sft --accelerate_config fsdp2-full.yaml {TRL} {BEST}"),
    "TRL SFT, FSDP2, LoRA": Run(command=f"trl sft --accelerate_config fsdp2-full.yaml {TRL} {BEST} --use_peft"),
    "TRL SFT, ZeRO-3": Run(command=f"trl sft --accelerate_config accelerate-zero3.yaml {TRL} {BEST}"),
    "TRL SFT, one GPU, resumed": _resumed("trl sft", TRL, num_gpus=1),
    "TRL SFT, FSDP2, resumed": _resumed("trl sft --accelerate_config fsdp2-full.yaml", TRL),
    "TRL SFT, ZeRO-3, resumed": _resumed("trl sft --accelerate_config accelerate-zero3.yaml", TRL),
    "LLaMA-Factory SFT, ZeRO-3": Run(command="llamafactory-cli train llamafactory.yaml", environment="llamafactory"),
    "LLaMA-Factory export": Run(
        command="llamafactory-cli export llamafactory-merge.yaml",
        environment="llamafactory",
        num_gpus=1,
        before="llamafactory-cli train llamafactory-lora.yaml",
    ),
    "Axolotl SFT, FSDP2": Run(
        command="axolotl train axolotl.yaml --launcher accelerate -- --num_processes 2", environment="axolotl"
    ),
    "Axolotl merge-lora": Run(
        command="axolotl merge-lora axolotl-lora.yaml",
        environment="axolotl",
        num_gpus=1,
        before="axolotl train axolotl-lora.yaml",
    ),
    "Axolotl merge-lora, legacy": Run(
        command="axolotl merge-lora axolotl-lora.yaml --merge-method legacy",
        environment="axolotl",
        num_gpus=1,
        before="axolotl train axolotl-lora.yaml",
    ),
    "ms-swift SFT, ZeRO-3": Run(
        command=f"{SWIFT} --tuner_type full --per_device_eval_batch_size 2 {EVALUATES} --load_best_model_at_end true "
        "--output_dir out --deepspeed zero3",
        environment="ms-swift",
    ),
    "ms-swift export": Run(
        command="swift export --adapters before/checkpoint-2 --merge_lora true --use_hf true",
        environment="ms-swift",
        num_gpus=1,
        before=f"{SWIFT} --tuner_type lora {NO_EVALUATION} --add_version false",
    ),
    "torchtune, full": Run(
        command=f"tune run full_finetune_single_device --config llama3_2/1B_full_single_device {TORCHTUNE}",
        environment="torchtune",
        before=CHECKPOINT,
        num_gpus=1,
    ),
    "torchtune, LoRA": Run(
        command=f"tune run lora_finetune_single_device --config llama3_2/1B_lora_single_device {TORCHTUNE}",
        environment="torchtune",
        before=CHECKPOINT,
        num_gpus=1,
    ),
    "torchtune, full, FSDP2": Run(
        command=f"tune run --nproc_per_node 2 full_finetune_distributed --config llama3_2/1B_full {TORCHTUNE}",
        environment="torchtune",
        before=CHECKPOINT,
    ),
    "torchtune, LoRA, FSDP2": Run(
        command=f"tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_2/1B_lora {TORCHTUNE}",
        environment="torchtune",
        before=CHECKPOINT,
    ),
    "accelerate loop, FSDP2": Run(command=f"{LAUNCH} fsdp2-full.yaml loop.py"),
    "accelerate loop, ZeRO-3": Run(command=f"{LAUNCH} accelerate-zero3.yaml loop.py"),
}
