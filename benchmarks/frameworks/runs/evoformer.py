"""OpenFold's Evoformer on a crop of its training: ``evoformer.py CLONE``, with OpenFold's clone.

Its modules, its configuration (``initial_training``: 256 residues, 128 + 1 sequences, a checkpoint each block) and
three steps of Adam in bf16 autocast; the input embedder and the structure module are left out. OpenFold's own CUDA
kernel (a softmax in place) is replaced by torch's, which allocates as much and gives it back.
"""

from __future__ import annotations

import sys
import types

import torch

sys.path.insert(0, sys.argv[1])
kernel = types.ModuleType("attn_core_inplace_cuda")
kernel.forward_ = lambda logits, rows, columns: logits.copy_(logits.softmax(-1))
kernel.backward_ = lambda logits, gradient, values, rows, columns: logits.mul_(gradient @ values.transpose(-1, -2))
sys.modules[kernel.__name__] = kernel
package = types.ModuleType("openfold")  # its own __init__ imports what reads PDB files
package.__path__ = [sys.argv[1] + "/openfold"]
model = types.ModuleType("openfold.model")
model.__path__ = [sys.argv[1] + "/openfold/model"]
sys.modules |= {"openfold": package, "openfold.model": model}

from openfold.model.evoformer import EvoformerStack  # noqa: E402

NUM_RESIDUES, NUM_SEQUENCES = 256, 129
stack = EvoformerStack(
    c_m=256,
    c_z=128,
    c_hidden_msa_att=32,
    c_hidden_opm=32,
    c_hidden_mul=128,
    c_hidden_pair_att=32,
    c_s=384,
    no_heads_msa=8,
    no_heads_pair=4,
    no_blocks=48,
    transition_n=4,
    msa_dropout=0.15,
    pair_dropout=0.25,
    no_column_attention=False,
    opm_first=False,
    fuse_projection_weights=False,
    blocks_per_ckpt=1,
    inf=1e9,
    eps=1e-10,
).cuda()
optimizer = torch.optim.Adam(stack.parameters(), lr=1e-3)
for _ in range(4):
    msa = torch.randn(1, NUM_SEQUENCES, NUM_RESIDUES, 256, device="cuda", requires_grad=True)
    pairs = torch.randn(1, NUM_RESIDUES, NUM_RESIDUES, 128, device="cuda", requires_grad=True)
    msa_mask, pair_mask = torch.ones_like(msa[..., 0]), torch.ones_like(pairs[..., 0])
    with torch.autocast("cuda", torch.bfloat16):
        outputs = stack(msa, pairs, msa_mask=msa_mask, pair_mask=pair_mask, chunk_size=None)
    sum(one.float().square().mean() for one in outputs).backward()
    optimizer.step()
    optimizer.zero_grad()
