"""A Llama of 134 million parameters in a loop of accelerate's, without a Trainer: evaluation, save_state, a last save.

Nothing in it knows of vramprobe.
"""

import torch
from accelerate import Accelerator
from train import Rows
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS = 2


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, training, held_out = accelerator.prepare(
        model,
        optimizer,
        torch.utils.data.DataLoader(Rows(4000), batch_size=2, shuffle=True),
        torch.utils.data.DataLoader(Rows(64), batch_size=2),
    )
    for _ in range(EPOCHS):
        model.train()
        for batch in training:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(**batch).logits.argmax(-1))
        accelerator.save_state("state")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        "final", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )


if __name__ == "__main__":
    main()
