"""Batches of varied shapes through a model, full fine-tuning: argv is a config's folder, the shapes, the file for what
was reserved after each step and allocated at most, and how long the outputs are kept: until the next ones, or not."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained(sys.argv[1])
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
torch.set_default_dtype(torch.float32)
model.train()
model.config.use_cache = False  # as a Trainer sets it
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
reserved, ids, labels, outputs, keeps = [], None, None, None, sys.argv[4] == "keeps-outputs"
for rows, length in json.loads(sys.argv[2]):
    ids = labels = None  # a loop that holds the former batch while the next is made keeps its 16 B per token longer
    ids = torch.zeros(rows, length, dtype=torch.long, device="cuda")
    labels = torch.zeros(rows, length, dtype=torch.long, device="cuda")
    if keeps:
        outputs = model(input_ids=ids, labels=labels)
        loss = outputs.loss
    else:
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()
    reserved.append(torch.cuda.memory_reserved())
Path(sys.argv[3]).write_text(json.dumps({"reserved": reserved, "allocated": torch.cuda.max_memory_allocated()}))
