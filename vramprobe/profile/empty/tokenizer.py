"""A small tokenizer that works, as long as the model's vocabulary: a token for each byte, and merges of English.

In: a vocabulary's size, the ids of the special tokens where they are known. Out: ``tokenizer.json`` and
``tokenizer_config.json``, with a chat template. `` a`` is one token, as in nearly every tokenizer; English comes to
three to four characters a token (merges.txt, made by tools/merges.py), where the vocabulary is large enough. The rest
of the vocabulary is filled with names that no text has.
"""

import os

from .replacements import write_json

#: Each message between marks of its own, an answer ended by the end of text and marked for who trains on it alone.
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
#: The first two are the template's; the others are what scripts ask their models' tokenizers for by name.
_MARKS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>",
    "<|finetune_right_pad_id|>", "<start_of_turn>", "<end_of_turn>", "<eos>", "<bos>", "<unk>", "[PAD]", "[INST]",
    "[/INST]", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>",
)  # fmt: skip


#: What encoders' tokenizers name besides; scripts ask for the mask.
ENCODER = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "unk_token": "[UNK]"}


def write(folder, vocab_size, special_ids=None, max_length=None, *, placed=None, words=(), named=None, kind=None):
    """``special_ids``: of bos, eos and pad, None where the model has none or it is not known. Further special tokens:
    ``placed`` at an id, ``words`` anywhere, ``named`` by an attribute of the tokenizer. ``kind``: its class.
    """
    named, words = named or {}, [*words, *(named or {}).values()]
    vocabulary, merges, special = _vocabulary(vocab_size, special_ids or {}, placed or {}, words)
    by_id = sorted(vocabulary.items(), key=lambda item: item[1])
    marks = {*special.values(), *_MARKS, *words, *(placed or {}).values()}
    added = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for word, number in by_id
        if word in marks
    ]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": bytes_of, "post_processor": None, "decoder": bytes_of,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": dict(by_id), "merges": merges},
    }  # fmt: skip
    about = {
        "tokenizer_class": kind or "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
        "model_max_length": max_length or 1 << 30,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{role}_token": word for role, word in special.items()},
        **{name: word for name, word in named.items() if name in ENCODER},
    }
    if others := {name: word for name, word in named.items() if name not in ENCODER}:
        about |= {"extra_special_tokens": others}
    for name, content in (("tokenizer.json", whole), ("tokenizer_config.json", about)):
        write_json(folder, name, content)


def write_clip(folder, size):
    """CLIP's: a token for each byte, another for the last of a word, merges within words, the two marks at the end."""
    pairs = [pair for pair in _merges() if "\u0120" not in "".join(pair)]
    marks = ["<|startoftext|>", "<|endoftext|>"]
    known = [*_bytes(), *(one + "</w>" for one in _bytes()), *("".join(pair) for pair in pairs)]
    words = list(dict.fromkeys(known))[: size - len(marks)]
    words += [f"<unused{number}>" for number in range(size - len(words) - len(marks))] + marks
    write_json(folder, "vocab.json", {word: number for number, word in enumerate(words)})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in pairs if "".join(pair) in words), ""]
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as out:
        out.write("\n".join(lines))


def write_t5(folder, size):
    """T5's: a piece for each printable letter and for each that begins a word; pad, end and unknown first, 100 marks
    at the end. Its texts are padded to one length, so that the number of a text's own pieces changes no shape."""
    special, marks = ["<pad>", "</s>", "<unk>"], [f"<extra_id_{number}>" for number in reversed(range(100))]
    letters = [chr(one) for one in range(33, 127)]
    words = [*special, "\u2581", *letters, *("\u2581" + one for one in letters)]
    words += [f"<unused{number}>" for number in range(size - len(words) - len(marks))] + marks
    added = [
        {"id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, word in enumerate(words) if word in {*special, *marks}
    ]  # fmt: skip
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "post_processor": {"type": "TemplateProcessing", "single": [text, end], "pair": [text, end, second, end],
                           "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}},
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": 2, "byte_fallback": False,
                  "vocab": [[word, 0.0 if word in special else -10.0] for word in words]},
    }  # fmt: skip
    write_json(folder, "tokenizer.json", whole)


def _vocabulary(size, special_ids, placed, words):
    """Words and their ids, the merges that make them, the special tokens by role."""
    taken = {number: word for number, word in placed.items() if 0 <= number < size}
    known = [word for word in dict.fromkeys([*_bytes(), *_MARKS, *words]) if word not in taken.values()]
    merges = _merges()[: max(size - len(known) - len(taken) - len(_SPECIAL), 0)]
    words = [*known, *("".join(pair) for pair in merges)]
    special = {}
    for role, word in _SPECIAL.items():
        given = special_ids.get(role)
        if isinstance(given, int) and 0 <= given < size and given not in taken:
            special[role], taken[given] = word, word
        elif given in taken:  # as gpt2, whose texts begin and end with the same token
            special[role] = taken[given]
        else:
            special[role] = word
            words.append(word)
    if len(words) + len(taken) > size:
        raise ValueError(f"a vocabulary of {size} is too small for a token for each byte: give it a tokenizer")
    rest = iter([*words, *(f"<unused{number}>" for number in range(size))])
    vocabulary = {taken[number] if number in taken else next(rest): number for number in range(size)}
    return vocabulary, [" ".join(pair) for pair in merges], special


def _merges():
    """Pairs of symbols, most frequent first; `` a`` before all."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "merges.txt"), encoding="utf-8") as file:
        pairs = [tuple(line.split()) for line in file.read().splitlines()]
    first = ("\u0120", "a")
    return [first, *(pair for pair in pairs if pair != first)]


def _bytes():
    """GPT-2's letter for each byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [one for one in range(256) if one not in printed]
    return [chr(one) for one in printed] + [chr(256 + number) for number in range(len(others))]
