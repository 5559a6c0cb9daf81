"""A small checkpoint that has learned something, so that its next token has a margin which roundings do not cross.

It repeats the token three places back: attention has to find it, and experts have to pass it on.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.support.tiny_checkpoint import make_random_checkpoint, write_shards

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.schema import Architecture
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.weights import views_by_hub_name

# Letters and digits of the tiny tokenizer: each is a text of its own.
FIRST, LAST = 2, 38
PERIOD, LENGTH = 3, 24
STEPS, BATCH = 250, 64
# What SGLang asks of these classes and transformers does not write.
ASKED_FOR = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def make_learned_checkpoint(folder: Path, arch: Architecture) -> Path:
    """Write config, tokenizer and weights in BF16, after some hundred steps of Adam with transformers' model."""
    make_random_checkpoint(folder, arch, seed=3)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | ASKED_FOR))
    make_tokenizer(arch.max_position_embeddings).save_pretrained(folder)
    model = load_model(folder, torch.float32).model.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        with torch.no_grad():
            tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.08, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    for _ in range(STEPS):
        begun = torch.randint(FIRST, LAST, (BATCH, PERIOD), generator=generator)
        tokens = begun.repeat(1, LENGTH // PERIOD)
        logits = model(input_ids=tokens).logits[:, PERIOD - 1 : -1]
        F.cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD:].flatten()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    tensors = {
        name: view.to(torch.bfloat16 if view.dim() > 1 or "norm" in name else view.dtype).contiguous()
        for name, view in views_by_hub_name(model.state_dict()).items()
    }
    if arch.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    write_shards(folder, tensors, 1)
    return folder
