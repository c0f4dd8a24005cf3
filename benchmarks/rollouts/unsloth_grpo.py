"""Unsloth's GRPO as its notebook of Qwen3 4B has it: with `fast_inference` vLLM is in the process, on the same weights.

In: a model, the share of the GPU that vLLM may take, and the tokens of a completion. It knows nothing of vramprobe.
"""

import sys

from unsloth import FastLanguageModel  # first: it changes what follows

from datasets import load_dataset  # isort: skip
from trl import GRPOConfig, GRPOTrainer  # isort: skip


def length(completions, **_):
    return [float(len(str(one))) for one in completions]


if __name__ == "__main__":
    name, utilization, completion = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=name,
        max_seq_length=2048,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=32,
        gpu_memory_utilization=utilization,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=32,
        lora_alpha=64,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[length],
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        args=GRPOConfig(
            temperature=1.0,
            learning_rate=5e-6,
            weight_decay=0.001,
            warmup_ratio=0.1,
            lr_scheduler_type="linear",
            optim="adamw_8bit",
            logging_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_completion_length=completion,
            max_steps=3,
            report_to="none",
            output_dir="out/unsloth",
        ),
    )
    trainer.train()
