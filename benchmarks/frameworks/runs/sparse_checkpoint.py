"""A checkpoint of a config.json that takes no room, as ``vramprobe profile --empty-weights`` makes it.

    sparse_checkpoint.py CONFIG.json FOLDER

Runs under the interpreter that is to read it, which need not have vramprobe.
"""

import json
import os
import sys

from transformers import AutoConfig

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "vramprobe", "profile"))
from empty import checkpoint


def write(config, folder, **how):
    """The model of ``config`` in bfloat16; ``how``: as checkpoint.write takes it."""
    model = checkpoint.model_of(config)
    checkpoint.write(model, folder, **how)
    config.architectures, config.torch_dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        write(AutoConfig.for_model(**json.load(given)), sys.argv[2])
