"""What the runs read: an empty checkpoint with a tokenizer of bytes, and rows of text that are all alike.

    prepare.py CONFIG.json FOLDER [one-file]     a checkpoint (sparse_checkpoint.py), in one file
    prepare.py data FOLDER                       rows for fine-tuning, for preferences and for prompts

Every row is as long as every other, so that a step is like the one before it. Each framework's own tokenizer and loader
read them; nothing of a framework is replaced.
"""

import base64
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
        config = AutoConfig.for_model(**json.load(file))
    sparse_checkpoint.write(config, folder, **({"max_shard_bytes": 1 << 40} if in_one_file else {}))
    write_tokenizer(folder)


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
    }
    for kind, row in kinds.items():
        os.makedirs(os.path.join(folder, kind), exist_ok=True)
        with open(os.path.join(folder, kind, "train.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for _ in range(NUM_ROWS))
        with open(os.path.join(folder, kind + ".json"), "w") as file:
            json.dump([row] * NUM_ROWS, file)
    with open(os.path.join(folder, "dataset_info.json"), "w") as file:  # LLaMA-Factory's list of what there is
        json.dump({"rows": {"file_name": "alpaca.json"}}, file)


if __name__ == "__main__":
    if sys.argv[1] == "data":
        write_data(sys.argv[2])
    else:
        write_model(sys.argv[1], sys.argv[2], "one-file" in sys.argv[3:])
