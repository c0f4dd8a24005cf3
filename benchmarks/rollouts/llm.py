"""A script that uses vLLM and knows nothing of vramprobe: LLM(**settings), then 8 tokens for a prompt of 32."""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    out = llm.generate({"prompt_token_ids": list(range(5, 37))}, SamplingParams(max_tokens=8, ignore_eos=True))
    print("generated", len(out[0].outputs[0].token_ids), "tokens")
