"""Training loops as people write them: what each keeps from one step to the next decides its peak memory.

vramprobe profile --emulate T4 --empty-weights -- python examples/loops.py keeps_outputs HuggingFaceTB/SmolLM2-135M

Nothing here knows of vramprobe; ``vramprobe predict --loop`` answers for each of them.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Tokens of no meaning: what a step allocates does not depend on them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.arange(self.length) % 1000 + index
        return {"input_ids": tokens, "labels": tokens}


def to_gpu(batch):
    return {name: tensor.cuda() for name, tensor in batch.items()}


def trainer(model, data, optimizer, options):
    """transformers' Trainer: the outputs are gone before backward."""
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=options.accumulate,
            bf16=options.autocast == "bf16",
            fp16=options.autocast == "fp16",
            max_steps=8,
            report_to="none",
            save_strategy="no",
        )
        Trainer(model, arguments, train_dataset=data.dataset, optimizers=(optimizer, None)).train()


def plain(model, data, optimizer, options):
    """Only the loss is kept: memory is that of a Trainer."""
    for number, batch in enumerate(data, 1):
        batch = to_gpu(batch)
        with cast(options):
            loss = model(**batch).loss
        (loss / options.accumulate).backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def zero_grad_first(model, data, optimizer, options):
    """Gradients are freed before the next forward, not after the step: the same peak."""
    for batch in data:
        batch = to_gpu(batch)
        optimizer.zero_grad()
        with cast(options):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()


def zero_grad_late(model, data, optimizer, options):
    """PyTorch's tutorials: the last step's gradients stand until this one's forward has ended."""
    for batch in data:
        batch = to_gpu(batch)
        with cast(options):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def keeps_outputs(model, data, optimizer, options):
    """``outputs`` holds the logits, and a cache of keys and values where there is one, until the next forward ends."""
    for number, batch in enumerate(data, 1):
        batch = to_gpu(batch)
        with cast(options):
            outputs = model(**batch)
        loss = outputs.loss / options.accumulate
        loss.backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def step_function(model, data, optimizer, options):
    """The outputs are a function's own: they are gone when it returns."""

    def step(batch):
        with cast(options):
            outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in data:
        step(to_gpu(batch))


def accelerated(model, data, optimizer, options):
    """accelerate's examples: as keeps_outputs, and under autocast the outputs are raised to fp32."""
    mixed = {"none": "no"}.get(options.autocast, options.autocast)
    accelerator = Accelerator(mixed_precision=mixed, gradient_accumulation_steps=options.accumulate)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def scaled(model, data, optimizer, options):
    """GradScaler, as fp16 needs it: a few numbers more."""
    scaler = torch.amp.GradScaler()
    for batch in data:
        batch = to_gpu(batch)
        optimizer.zero_grad()
        with cast(options):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def evaluates(model, data, optimizer, options):
    """An evaluation after every second step, by batches of the same size."""
    for number, batch in enumerate(data, 1):
        batch = to_gpu(batch)
        with cast(options):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2 == 0:
            model.eval()
            with torch.no_grad(), cast(options):
                print(model(**batch).loss.item())
            model.train()


def cast(options):
    dtype = getattr(torch, {"bf16": "bfloat16"}.get(options.autocast, "float16"))
    return torch.autocast("cuda", dtype, enabled=options.autocast != "none")


LOOPS = (trainer, plain, zero_grad_first, zero_grad_late, keeps_outputs, step_function, accelerated, scaled, evaluates)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=[one.__name__ for one in LOOPS])
    parser.add_argument("model")
    parser.add_argument("--method", choices=("full", "lora"), default="lora")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--autocast", choices=("bf16", "fp16", "none"), default="bf16")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--use-cache", action="store_true", help="leave the model's cache of keys and values on")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    options = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if options.method == "lora":
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if not options.use_cache:
        model.config.use_cache = False
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.cuda().train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    data = torch.utils.data.DataLoader(Rows(options.length), batch_size=options.rows)
    next(loop for loop in LOOPS if loop.__name__ == options.loop)(model, data, optimizer, options)
