"""Meanings of a memory table's terms in a few words: the command line, the page and docs/words.md say these.

In: nothing. Out: MEANINGS, by the term's name.
"""

MEANINGS: dict[str, str] = {
    "weights": "parameters, buffers, quantization state",
    "gradients": "of the trained parameters",
    "optimizer_state": "from the first step on",
    "batch": "tokens and labels",
    "saved_activations": "made in forward, kept for backward",
    "checkpoint_store": "each layer's input, kept by gradient checkpointing",
    "recomputed_layer": "the layer that backward runs again",
    "logits": "a score for each token and word, in fp32 too",
    "cast_copies": "weights that autocast copied to 16 bits",
    "dequantisation": "quantized weights made 16-bit to be used",
    "temporaries": "live within their phase only",
    "optimizer_temporaries": "live within the optimizer's step",
    "gathered_weights": "other ranks' shards, while they are used",
    "gradient_buckets": "gradients on their way to the other ranks",
    "workspaces": "cuBLAS's, one for each thread that calls it",
    "block_remainders": "what the allocator rounds up",
    "other": "what no cause was found for",
    "constant": "what the fit has beside the terms",
    "allocator": "reserved by torch, not handed out",
    "context": "CUDA context and libraries",
}
#: These need no word below a table.
PLAIN = (
    "weights", "gradients", "optimizer_state", "batch", "saved_activations", "logits", "temporaries",
    "optimizer_temporaries", "other",
)  # fmt: skip
