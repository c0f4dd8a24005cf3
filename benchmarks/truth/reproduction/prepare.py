"""Inputs of a published run, made in its own stack.

    prepare.py model CONFIG TOKENIZER FOLDER SHARD_BYTES [gptq]
    prepare.py data ROWS FILE

A model: its configuration, weights that take no room (checkpoint.py), a tokenizer with as many words and the same
special tokens. Data: JSON lines of one long text, which a packing trainer cuts into ROWS rows of 4096 tokens. No value
in either has any meaning.
"""

import json
import os
import sys

from checkpoint import write_checkpoint

ROW_WORDS = 4096


def write_model(config_file, tokenizer_file, folder, shard_bytes, gptq=None):
    """The folder that ``from_pretrained`` is given. ``gptq``: 4-bit linear layers as AutoGPTQ keeps them."""
    from transformers import AutoConfig

    with open(config_file) as given:
        config = AutoConfig.for_model(**json.load(given))
    write_checkpoint(config, folder, None if gptq else int(shard_bytes), gptq=bool(gptq))
    _write_tokenizer(tokenizer_file, folder)


def _write_tokenizer(tokenizer_file, folder):
    """A tokenizer of so many words, by the class and with the special tokens of the published model's own."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    with open(tokenizer_file) as given:
        told = json.load(given)
    special = list(dict.fromkeys([*told["special_tokens"].values(), *told.get("more_tokens", [])]))
    words = {word: number for number, word in enumerate([*special, "word"])}
    while len(words) < told["num_tokens"]:
        words[f"w{len(words)}"] = len(words)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as out:
        longest = told.get("model_max_length", 10**30)
        json.dump({"tokenizer_class": told["class"], "model_max_length": longest, **told["special_tokens"]}, out)


def write_data(num_rows, file):
    """As many lines as rows, and one more for what packing leaves over."""
    line = json.dumps({"output": " ".join(["word"] * ROW_WORDS)})
    with open(file, "w") as out:
        out.write(f"{line}\n" * (int(num_rows) + 1))


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    {"model": write_model, "data": write_data}[what](*given)
