"""A Llama of 134 million parameters by transformers' Trainer, with evaluation, save, and the best model at the end.

``train.py [--lora_r 16 [--merge]] [--ema] [TrainingArguments]``. Nothing in it knows of vramprobe.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


@dataclass
class Arguments:
    """Arguments of the training, and of what is kept beside it."""

    lora_r: int = 0
    merge: bool = False
    ema: bool = False


class Average(TrainerCallback):
    """An exponential moving average of the weights, on the GPU."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.average.update_parameters(model)


class Rows(torch.utils.data.Dataset):
    """Rows of 512 tokens, all alike."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.arange(512)
        return {"input_ids": tokens, "labels": tokens}


def main():
    given, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12
    )
    model = LlamaForCausalLM(config)
    if given.lora_r:
        model = get_peft_model(model, LoraConfig(r=given.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(model, training, train_dataset=Rows(4000), eval_dataset=Rows(64))
    if given.ema:
        trainer.add_callback(Average())
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if given.merge:
        trainer.model.merge_and_unload().save_pretrained(f"{training.output_dir}/merged")
    trainer.save_model(f"{training.output_dir}/final")


if __name__ == "__main__":
    main()
