"""A published run by its own libraries: TRL's SFTTrainer on packed rows, on one GPU, or on several by FSDP.

    sft.py full|lora|qlora-kbit|qlora-nokbit BATCH LENGTH MODEL_FOLDER [amp=bf16] [drop=0.1] [storage=1]

As fms-acceleration's benchmark starts it (scripts/benchmarks/benchmark.py, tuning/sft_trainer.py): weights in bfloat16,
flash-attn, gradient checkpointing, AdamW, LoRA of rank 16 on q, k, v, o. ``qlora-nokbit``: its plugin
accelerated-peft-bnb, which prepares nothing for k-bit training; ``storage``: 4-bit weights kept in bfloat16 so that
FSDP can shard them.
Prints, from rank 0, a line of JSON: what HF's TrainerMemoryTracker gives (what the rows publish), in bytes.
After ../shared/emulator/try/sft_published.py.
"""

import inspect
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    modeling_utils,
)
from trl import SFTConfig, SFTTrainer  # noqa: E402

NUM_STEPS = 4


def main(mode, batch_size, seq_len, folder, amp=None, drop="0.1", storage=None):
    batch_size, seq_len, num_ranks = int(batch_size), int(seq_len), int(os.environ.get("WORLD_SIZE", 1))
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    rows = [[1] * seq_len] * (batch_size * NUM_STEPS * num_ranks)
    # first, as there: it starts the process group and takes the rank's own card
    args = SFTConfig(
        os.path.join(folder, "out"), per_device_train_batch_size=batch_size, max_steps=NUM_STEPS, logging_steps=1,
        gradient_checkpointing=True, optim="adamw_torch", save_strategy="no", report_to=[], max_seq_length=seq_len,
        dataset_kwargs={"skip_prepare_dataset": True}, skip_memory_metrics=False, **({amp: True} if amp else {}),
    )  # fmt: skip
    load = {"torch_dtype": torch.bfloat16, "use_cache": False, "attn_implementation": "flash_attention_2"}
    if mode.startswith("qlora"):
        load["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            **({"bnb_4bit_quant_storage": torch.bfloat16} if storage else {}),
        )  # fmt: skip
        load["device_map"] = None if storage else {"": 0}
        if storage:  # as fms-acceleration's framework_plugin_bnb.py: every rank loads the weights, not rank 0 alone
            modeling_utils.is_local_dist_rank_0 = lambda: True
    model = AutoModelForCausalLM.from_pretrained(folder, **load)
    lora = None
    if mode != "full":
        lora = LoraConfig(
            r=16, lora_alpha=16, lora_dropout=float(drop), task_type="CAUSAL_LM",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        )  # fmt: skip
    if mode == "qlora-nokbit":
        model, lora = get_peft_model(model, lora), None
        model.enable_input_require_grads()
    newer = "processing_class" in inspect.signature(SFTTrainer.__init__).parameters
    trainer = SFTTrainer(
        model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), peft_config=lora,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        **{"processing_class" if newer else "tokenizer": tokenizer},
    )  # fmt: skip
    found = trainer.train().metrics
    after = found["before_init_mem_gpu"] + found["init_mem_gpu_alloc_delta"] + found["train_mem_gpu_alloc_delta"]
    if int(os.environ.get("RANK", 0)) == 0:
        said = {
            "peak_bytes": after + found["train_mem_gpu_peaked_delta"],
            "after_bytes": after,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5], **dict(word.split("=") for word in sys.argv[5:]))
