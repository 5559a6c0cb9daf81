"""Three updates of every family in many layouts, held against those of one rank: one gang for each number of ranks.

Gangs are forked off one process that has imported everything. Each leaves `found{ranks}.json` in the folder:
"family: layout" -> by how much it is off (`compare`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.support.hub_tensors import fill

# What is 2 where a layout names it, and by how much it multiplies the ranks. Data parallelism is what is left.
DIMENSIONS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "data": "",
}
NUM_UPDATES = 3
LEARNING_RATE = 3e-3
# Of Adam, near typical gradients. It divides each by its own size: those that are rounding alone would move
# as far as any other, in each layout elsewhere.
EPSILON = 1e-4


def products(has_experts: bool, most_ranks: int = 4) -> Iterator[str]:
    """Yield every product of dimensions of 1 and 2 on two ranks to `most_ranks`, as words."""
    for count in range(1, most_ranks.bit_length()):
        for chosen in combinations(DIMENSIONS, count):
            layout = " ".join(chosen)
            yield layout
            ranks_of_a_stage = 2 ** len({*chosen} - {"pipeline"})
            if has_experts and ranks_of_a_stage > 1:
                yield f"{layout} expert"
            if has_experts and "tensor" in chosen and ranks_of_a_stage > 2:
                yield f"{layout} expert expert_tensor"


def num_ranks(layout: str) -> int:
    return int(2 ** sum(word in DIMENSIONS for word in layout.split()))


def parallel(layout: str, arch: Any) -> dict[str, int]:
    """Return the sizes of a layout; stages differ where a model's layers do not divide."""
    words = layout.split()
    sizes = {DIMENSIONS[word]: 2 for word in words if DIMENSIONS.get(word)}
    if "interleaved" in words:
        sizes["virtual_pipeline_model_parallel_size"] = 2
    elif "pipeline" in words:
        sizes["num_layers_in_last_pipeline_stage"] = arch.num_hidden_layers - 2
    if "expert" in words:
        sizes["expert_model_parallel_size"] = 2
    if arch.n_routed_experts and "tensor" in words and ("expert_tensor" in words or "expert" not in words):
        sizes["expert_tensor_parallel_size"] = 2
    return sizes


def main() -> None:
    request = json.loads(sys.argv[1])
    from tests.support.megatron_single import run_forked

    folder, seconds = Path(request["folder"]), {}
    for ranks in (1, 2, 4):
        begun = time.perf_counter()
        cases = [(layout, family) for layout, family in request["cases"] if num_ranks(layout) == ranks]
        if cases:
            run_forked(ranks, folder / f"meeting{ranks}", partial(run_gang, cases, folder))
        seconds[ranks] = time.perf_counter() - begun
    print("seconds of each gang:", seconds)


def run_gang(cases: list[tuple[str, str]], folder: Path) -> None:
    """Run the cases of this number of ranks; the one rank's results are what the others are held against."""
    from posttrain.config.schema import Architecture, RopeScaling
    from posttrain.config.vision import VisionTower

    found, laid_out = {}, None
    for layout, family in sorted(cases):
        values = json.loads((folder / family / "architecture.json").read_text())
        parts = {"rope_scaling": RopeScaling(**values["rope_scaling"]), "vision": VisionTower(**values["vision"])}
        arch = Architecture(**values | parts)
        config = config_of(arch, layout)
        # A model without experts has other groups under the same words.
        if config.parallel != laid_out:
            lay_out(config)
            laid_out = config.parallel
        made = measure(config, folder / family / "hf")
        if not layout:
            torch.save(made, folder / family / "one_rank.pt")
        elif dist.get_rank() == 0:
            found[f"{family}: {layout}"] = compare(made, torch.load(folder / family / "one_rank.pt"))
    if dist.get_rank() == 0:
        (folder / f"found{dist.get_world_size()}.json").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves while others still talk


def lay_out(config: Any) -> None:
    """Join the other ranks, or lay all out anew."""
    from megatron.core import parallel_state

    from posttrain.rl.megatron_backend import initialize

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        initialize.join_ranks = lambda *_: None  # they have met
    initialize.initialize(config)


def config_of(arch: Any, layout: str) -> Any:
    """Return a configuration with the ranks of a layout, whose updates have several micro-batches of eight samples."""
    from tests.support.megatron_layouts import small_batches
    from tests.support.megatron_single import test_config

    config = small_batches(test_config(arch, **parallel(layout, arch)), num_ranks(layout), batch=8)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, eps=EPSILON))


def measure(config: Any, checkpoint: Path) -> dict[str, Any]:
    """Make three updates as a step of training does; returns what came of them, tensors by Hub names on rank 0 alone.

    Returns:
        Losses and gradient norms of all updates; "gradients" of the first; "before" and "after", the weights.
    """
    from megatron.core import parallel_state
    from tests.support.megatron_layouts import make_groups

    from posttrain.rl.algorithm.sft import SupervisedFineTuning
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    policy, objective = build_policy(config), SupervisedFineTuning("token_mean", 32)
    weights = HubWeights(policy.chunks, config.model.architecture)
    tensors = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    fill(weights, tensors)
    assert policy.optimizer is not None
    policy.optimizer.reload_model_params()
    gradients: list[dict[str, torch.Tensor]] = []
    groups = make_groups(config.model.architecture.vocab_size, 2 * NUM_UPDATES)
    updates = make_updates(config, objective, groups, parallel_state.get_data_parallel_rank())
    assert len(updates) == NUM_UPDATES
    before, said = whole(weights), []
    for update in updates:
        look = None if gradients else lambda _: gradients.append(reduced_gradients(policy, weights))
        batches = update.micro_batches(objective.needs)
        said.append(train_step.update(policy, objective, batches, LEARNING_RATE, look=look))
    return {
        "losses": [update.loss for update in said],
        "grad_norms": [update.grad_norm for update in said],
        "gradients": gradients[0],
        "before": before,
        "after": whole(weights),
    }


def whole(weights: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in weights.gather(dtype=torch.float32) if t is not None}


def reduced_gradients(policy: Any, weights: Any) -> dict[str, torch.Tensor]:
    """Return what the optimizer is about to read, of which each data-parallel rank has reduced its own share.

    It is read through the table of the weights, whose places it takes meanwhile.
    """
    for buffer in policy.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    held = [parameter.data.clone() for parameter in policy.parameters()]
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.main_grad)
    gathered = whole(weights)
    for parameter, value in zip(policy.parameters(), held, strict=True):
        parameter.data.copy_(value)
    return {name: value for name, value in gathered.items() if not name.endswith("e_score_correction_bias")}


def compare(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return how far off losses and gradient norms are, and the tensors that are farthest: by gradient, and by move."""
    gradients = expected["gradients"]
    assert gradients.keys() == ours["gradients"].keys()
    off = {
        name: float((ours["gradients"][name] - g).abs().max()) / scale(gradients, name) for name, g in gradients.items()
    }
    moved = {name: by_move(ours, expected, name) for name in gradients}
    return {
        "loss": relative(ours["losses"], expected["losses"]),
        "grad_norm": relative(ours["grad_norms"], expected["grad_norms"]),
        "gradient": max(off.items(), key=lambda item: item[1]),
        "move": max(moved.items(), key=lambda item: item[1]),
    }


def relative(ours: list[float], expected: list[float]) -> float:
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, expected, strict=True))


def scale(gradients: dict[str, torch.Tensor], name: str) -> float:
    """Return a tensor's largest absolute gradient; a bias of keys is measured with the weight that it belongs to.

    A softmax does not feel what is added to all keys alike: the gradient of such a bias is what is left of sums that
    cancel, and their rounding is that of the weight's.
    """
    names = [name, name.replace("k_proj.bias", "k_proj.weight")]
    return max(float(gradients[each].abs().max()) for each in names) or 1e-12


def by_move(ours: dict[str, Any], expected: dict[str, Any], name: str) -> float:
    """Return the L2 norm of a weight's difference in terms of the move that it made."""
    move = (expected["after"][name] - expected["before"][name]).double().norm()
    difference = (ours["after"][name] - expected["after"][name]).double().norm()
    return float(difference / move) if difference else 0.0


if __name__ == "__main__":
    main()
