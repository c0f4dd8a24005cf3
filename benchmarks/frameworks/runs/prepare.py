"""Inputs of the runs: an empty checkpoint with a tokenizer of bytes, and rows of text that are all alike.

    prepare.py CONFIG.json FOLDER [one-file]     a checkpoint (sparse_checkpoint.py), in one file
    prepare.py data FOLDER                       rows for fine-tuning, for preferences, for prompts, and with images

A config of vramprobe/data/profiled has its processor or its pooling besides, as ``--empty-weights`` makes them; one
of a pipeline of diffusers' (stable-diffusion-v1-5.json) has a folder for each part.

Every row is as long as every other, so that a step is like the one before it. Each framework's own tokenizer and loader
read them; nothing of a framework is replaced.
"""

import base64
import csv
import functools
import importlib
import json
import os
import sys

NUM_ROWS, NUM_CHARACTERS = 256, 480
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def write_model(config_path, folder, in_one_file):
    """An empty checkpoint of this config, with the tokenizer."""
    import sparse_checkpoint
    from transformers import AutoConfig

    with open(config_path) as file:
        config = json.load(file)
    if "unet" in config:
        return write_pipeline(config, folder)
    listed = os.path.join(os.path.dirname(config_path), "MODELS.csv")
    if os.path.isfile(listed):
        return write_profiled(config, folder, listed, os.path.basename(config_path).removesuffix(".json"))
    config = AutoConfig.for_model(**config)
    sparse_checkpoint.write(config, folder, **({"max_shard_bytes": 1 << 40} if in_one_file else {}))
    write_tokenizer(folder)


def write_profiled(config, folder, listed, slug):
    """As ``vramprobe profile --empty-weights`` makes it."""
    from empty import hub

    with open(listed) as file:
        about = next(row for row in csv.DictReader(file) if row["slug"] == slug)
    os.makedirs(folder, exist_ok=True)
    hub.fill(folder, config, None, about)


def write_pipeline(parts, folder):
    """The empty models of a pipeline of diffusers', its scheduler, and a CLIP tokenizer of bytes."""
    for name, config in parts.items():
        into, (library, kind) = os.path.join(folder, name), config.pop("_class").split(".")
        library = importlib.import_module(library)
        if name == "scheduler":
            getattr(library, kind)(**config).save_pretrained(into)
        elif library.__name__ == "diffusers":
            _write_part(functools.partial(getattr(library, kind), **config), into, "diffusion_pytorch_model")
        else:
            config = getattr(library, kind).config_class(**config)
            _write_part(functools.partial(getattr(library, kind), config), into, "model")
    _write_clip_tokenizer(os.path.join(folder, "tokenizer"))


def _write_part(make, folder, stem):
    import torch
    from empty import checkpoint

    with torch.device("meta"):
        model = make()
    checkpoint.write(model, folder, "float32")
    os.rename(os.path.join(folder, "model.safetensors"), os.path.join(folder, stem + ".safetensors"))
    (model.save_config if hasattr(model, "save_config") else model.config.save_pretrained)(folder)


def _write_clip_tokenizer(folder):
    """A token for each byte, in a word and at its end; the special ones at CLIP's ids."""
    from tokenizers import pre_tokenizers

    os.makedirs(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*letters, *(one + "</w>" for one in letters)])}
    marks = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    vocabulary |= {mark: 49406 + number for number, mark in enumerate(marks.values())}
    files = {
        "vocab.json": json.dumps(vocabulary),
        "merges.txt": "#version: 0.2\n",
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **marks, "pad_token": marks["eos_token"]}
        ),
    }
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(content)


def write_tokenizer(folder):
    """A token for each byte, ChatML for conversations; and the same bytes as Llama 3's tokenizer.model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        model_max_length=32768,
        model_input_names=["input_ids", "attention_mask"],
    )
    whole.chat_template = CHAT
    whole.save_pretrained(folder)
    with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
        file.writelines(base64.b64encode(bytes([one])) + f" {one}\n".encode() for one in range(256))


def write_data(folder):
    """One folder of JSON lines for each kind of training."""
    prompt, answer = "p" * (NUM_CHARACTERS // 4), "a" * (NUM_CHARACTERS * 3 // 4)
    question = [{"role": "user", "content": prompt}]
    answered = {"role": "assistant", "content": answer}
    kinds = {
        "text": {"text": prompt + answer},
        "chat": {"messages": [*question, answered]},
        "alpaca": {"instruction": prompt, "input": "", "output": answer},
        "preference": {"prompt": prompt, "chosen": answer, "rejected": answer[::-1]},
        "prompt": {"prompt": prompt},
        "pair": {"anchor": prompt, "positive": answer},
        "hellaswag": {"ctx": prompt, "endings": [answer] * 4, "label": "0"},
    }
    for kind, row in kinds.items():
        os.makedirs(os.path.join(folder, kind), exist_ok=True)
        with open(os.path.join(folder, kind, "train.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for _ in range(NUM_ROWS))
        with open(os.path.join(folder, kind + ".json"), "w") as file:
            json.dump([row] * NUM_ROWS, file)
    with open(os.path.join(folder, "dataset_info.json"), "w") as file:  # LLaMA-Factory's list of what there is
        json.dump({"rows": {"file_name": "alpaca.json"}}, file)
    write_tables(folder, kinds["chat"], prompt, answer)


def write_tables(folder, chat, prompt, answer):
    """Conversations as Parquet, others with an image, and a folder of images with captions: gray, 512 × 512 pixels."""
    import sparse_checkpoint  # noqa: F401  it knows where "empty" is
    from datasets import Dataset, Image
    from empty import images

    Dataset.from_list([chat] * NUM_ROWS).to_parquet(os.path.join(folder, "chat.parquet"))
    picture = images.png(512, 512)
    for kind in ("pictures", "vision"):
        os.makedirs(os.path.join(folder, kind), exist_ok=True)
    with open(os.path.join(folder, "pictures", "metadata.jsonl"), "w") as captions:
        for number in range(16):
            with open(os.path.join(folder, "pictures", f"{number}.png"), "wb") as file:
                file.write(picture)
            captions.write(json.dumps({"file_name": f"{number}.png", "text": "a gray square"}) + "\n")
    asked = {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": prompt}]}
    answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    seen = {"messages": [asked, answered], "images": [{"bytes": picture, "path": None}]}
    table = Dataset.from_list([seen] * NUM_ROWS).cast_column("images", [Image()])
    table.to_parquet(os.path.join(folder, "vision", "train.parquet"))


if __name__ == "__main__":
    if sys.argv[1] == "data":
        write_data(sys.argv[2])
    else:
        write_model(sys.argv[1], sys.argv[2], "one-file" in sys.argv[3:])
