"""One rank of a layout: loads converted checkpoints of all families into Megatron's own models and tells how they fare.

Prints JSON: family -> "unequal" (shards that are not what lies in the checkpoint, MTP layers included) and
"logits_difference" (from the reference's logits, the largest; on ranks that have logits, of families that Megatron's
standard GPT model computes).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.config.schema import Config


def main() -> None:
    arguments = json.loads(sys.argv[1])
    sys.path.insert(0, arguments["root"])
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import FAMILIES

    from posttrain.rl.megatron_backend.initialize import initialize

    folders = {family: Path(folder) for family, folder in arguments["folders"].items()}
    # Before Megatron's stand-ins for CUDA are in place: transformers loads models on the meta device, too.
    computed = [family for family in folders if not FAMILIES[family].kv_lora_rank]
    references = {family: reference_logits(folders[family] / "hf", FAMILIES[family].vocab_size) for family in computed}
    results = {}
    for family, folder in folders.items():
        config = test_config(FAMILIES[family], **arguments["parallel"])
        if not dist.is_initialized():
            initialize(config)
        results[family] = check(config, folder / "torch_dist", references.get(family))
    print(json.dumps(results))
    dist.destroy_process_group()


@torch.no_grad()
def reference_logits(folder: Path, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [B, S] and transformers' logits [B, S, V] for them."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(2, vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return tokens, model.eval()(tokens).logits


def check(config: Config, folder: Path, reference: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, object]:
    from tests.support.megatron_families import build_model

    result: dict[str, object] = {"unequal": unequal_shards(load(build_model(config), folder), folder)}
    if reference:
        logits = compute_logits(load(build_model(config, with_mtp=False), folder), reference[0])
        if logits is not None:
            result["logits_difference"] = float((logits - reference[1]).abs().max())
    return result


def load(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Fill a model from a checkpoint as Megatron does it."""
    from megatron.core import dist_checkpointing
    from tests.support.megatron_families import METADATA

    assert dist_checkpointing.load_content_metadata(str(folder)) == METADATA
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    state = model.sharded_state_dict(metadata=dict(METADATA))
    weights = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    loaded = dist_checkpointing.load({"model": weights}, str(folder))["model"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert all(key.endswith("_extra_state") for key in missing), missing
    return model


def unequal_shards(model: torch.nn.Module, folder: Path) -> list[str]:
    """Compare what a loaded model would save with what lies in the checkpoint, bit by bit."""
    from tests.support.megatron_families import sharded_tensors

    reader, wrong = TorchDistReader(folder), []
    for shard in sharded_tensors(model):
        sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        stored = reader.read(shard.key, tuple(shard.global_offset), sizes).to(shard.data.dtype)
        if not torch.equal(stored, shard.data.reshape(sizes)):
            wrong.append(shard.key)
    return wrong


@torch.no_grad()
def compute_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return logits [B, S, V] where this rank's stage is the last, None elsewhere.

    Args:
        model: This rank's stage.
        tokens: [B, S] int64.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    model.eval()
    if not model.pre_process:
        received = torch.empty(length, batch, model.config.hidden_size)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    output = model(tokens, positions, mask)
    if model.post_process:
        return gather_from_tensor_model_parallel_region(output).float()
    dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


if __name__ == "__main__":
    main()
