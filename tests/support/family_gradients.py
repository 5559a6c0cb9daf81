"""One rank of two: the gradients of every family in every layout, held against those of one rank.

Prints JSON: "family layout" -> (Hub name of the gradient that is farthest off, by how much of its largest value).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    from tests.support.megatron_single import test_config

    from posttrain.config.schema import Architecture, RopeScaling

    folder, found = Path(request["folder"]), {}
    sequences = torch.load(folder / "sequences.pt")
    for layout, parallel in request["layouts"].items():
        is_laid_out = False
        for family, values in request["architectures"].items():
            arch = Architecture(**values | {"rope_scaling": RopeScaling(**values["rope_scaling"])})
            if layout == "expert" and not arch.n_routed_experts:
                continue
            config = test_config(arch, **parallel)
            if not is_laid_out:
                lay_out(config)
                is_laid_out = True
            found[f"{family} {layout}"] = farthest(config, folder / family, sequences)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def lay_out(config: Any) -> None:
    """Join the other rank, or lay both out anew."""
    from megatron.core import parallel_state

    from posttrain.megatron_backend import initialize

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        initialize.join_ranks = lambda *_: None  # they have met
    initialize.initialize(config)


def farthest(config: Any, checkpoint: Path, sequences: list[torch.Tensor]) -> tuple[str, float]:
    """Compute the gradients in this layout, and compare them on rank 0."""
    from posttrain.megatron_backend.weights import HubWeights

    policy = build(config)
    weights = HubWeights(policy.model, config.model.architecture)
    tensors = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    weights.transform(lambda name, _: tensors[name].float())
    run(policy, sequences)
    ours = gathered(policy, weights)
    if dist.get_rank() != 0:
        return "", 0.0
    expected = torch.load(checkpoint.with_name(f"{checkpoint.name}.pt"))
    assert expected.keys() == ours.keys()
    expected = {name: g for name, g in expected.items() if not name.endswith("e_score_correction_bias")}
    off = {name: float((ours[name] - g).abs().max()) / scale(expected, name) for name, g in expected.items()}
    worst = max(off, key=off.__getitem__)
    return worst, off[worst]


def scale(gradients: dict[str, torch.Tensor], name: str) -> float:
    """Return a tensor's largest absolute gradient; a bias of keys is measured with the weight that it belongs to.

    A softmax does not feel what is added to all keys alike: the gradient of such a bias is what is left of sums that
    cancel, and their rounding is that of the weight's.
    """
    names = [name, name.replace("k_proj.bias", "k_proj.weight")]
    return max(float(gradients[each].abs().max()) for each in names) or 1e-12


def build(config: Any) -> Any:
    """Return the policy behind a wrapper that adds up whole gradients, which every rank then holds."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from posttrain.megatron_backend.expert_load import ExpertLoad
    from posttrain.megatron_backend.model import Policy, build_model

    model = build_model(config)
    settings = model.config
    wrapped = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    settings.finalize_model_grads_func = lambda chunks, _, **kwargs: finalize_model_grads(chunks, None, **kwargs)
    settings.grad_scale_func = None
    return Policy(config, model, wrapped, None, ExpertLoad(model))


def run(policy: Any, sequences: list[torch.Tensor]) -> None:
    """Go forward and backward over all sequences, shared out over data-parallel ranks, as two micro-batches."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    labels = torch.cat(sequences).roll(-1).split([len(s) for s in sequences])
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(zip(sequences, labels, strict=True))[rank::size]
    # Tensor-parallel ranks share a row evenly.
    batches = [mine] if size == 1 else [mine[:1], mine[1:]]
    policy.wrapped.train()
    policy.wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[policy.wrapped],
        num_microbatches=len(batches),
        seq_length=sum(len(s) for s in sequences),
        micro_batch_size=1,
        forward_only=False,
    )


def forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run over sequences that are padded where ranks share them; padding is not asked for."""
    from megatron.core import parallel_state

    from posttrain.megatron_backend.packed import PackedSequences

    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    sequences, labels = zip(*next(batches), strict=True)
    padding = [-len(sequence) % (2 * size if size > 1 else 1) for sequence in sequences]
    boundaries = torch.tensor([0, *(len(s) + behind for s, behind in zip(sequences, padding, strict=True))])
    row = PackedSequences.from_boundaries(boundaries.cumsum(0).int(), rank, size)
    given = zip(sequences, labels, (torch.ones_like(sequence) for sequence in sequences), strict=True)
    padded = [torch.stack([F.pad(t, (0, behind)) for t in ts]) for ts, behind in zip(given, padding, strict=True)]
    tokens, labels, mask = row.cut(torch.cat(padded, dim=1).T).T[:, None]
    output = model(tokens, row.position_ids[None], None, labels=labels, loss_mask=mask, packed_seq_params=row)
    return output, summed


def summed(answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    return answers[0].sum(), torch.zeros([], dtype=torch.int), {}


def gathered(policy: Any, weights: Any) -> dict[str, torch.Tensor]:
    """Return the gradients by Hub name on rank 0, read through the table of the weights, whose places they take."""
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.main_grad)
    return {name: whole.clone() for name, whole in weights.gather(dtype=torch.float32) if whole is not None}


if __name__ == "__main__":
    main()
