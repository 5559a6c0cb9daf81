"""Gangs of ranks, one after the other: each loads the random checkpoint, trains, and tells what its ranks agree on."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.support.hub_tensors import fill
from tests.support.quantised import quantised

from posttrain.config.schema import Config
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

# Of FP8; the first is the Hub's own precision.
STRATEGIES = ("", "block", "channel", "tensor")


def make_groups(vocab_size: int, num_groups: int = 3, size: int = 4, seed: int = 11) -> list[TrajectoryGroup]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for prompt_id in range(num_groups):
        prompt = tuple(torch.randint(2, vocab_size, (9 + 7 * prompt_id,), generator=generator).tolist())
        samples = []
        for index in range(size):
            response = torch.randint(2, vocab_size, (5 + 6 * index,), generator=generator).tolist()
            ids = {"prompt_id": prompt_id, "sample_index": index}
            logprobs, reward = [-4.0] * len(response), float(index % 2)
            samples.append(Trajectory.of_response(prompt, response, logprobs, 0, reward=reward, **ids))
        groups.append(TrajectoryGroup(Prompt(prompt_id, (), ""), tuple(samples)))
    return groups


def main() -> None:
    """Make one gang after the other; each rank leaves its result beside the folder of its gang's state."""
    order = json.loads(sys.argv[1])
    from tests.support.megatron_single import run_forked

    for request in order["requests"]:
        folder = Path(request["folder"])
        run_forked(request["ranks"], folder.with_name("meeting"), partial(run_rank, request, folder))


def run_rank(request: dict[str, Any], folder: Path) -> None:
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TRAINED

    config = small_batches(test_config(TRAINED, **request["parallel"]), request["ranks"])
    trainer = dataclasses.replace(config.trainer, **request["trainer"])
    config = dataclasses.replace(config, trainer=trainer)
    other = Path(request["other"]) if "other" in request else None
    result = json.dumps(run(config, Path(request["checkpoint"]), folder, other, request["strategies"]))
    folder.with_name(f"{os.environ['RANK']}.json").write_text(result)


def small_batches(config: Config, ranks: int, batch: int = 12) -> Config:
    trainer = dataclasses.replace(config.trainer, max_tokens_per_gpu=96)
    training = dataclasses.replace(config.training, global_batch_size=batch)
    hardware = dataclasses.replace(config.hardware, gpus_per_node=ranks)
    return dataclasses.replace(config, trainer=trainer, training=training, hardware=hardware)


def run(
    config: Config, checkpoint: Path, folder: Path, other: Path | None, strategies: Sequence[str]
) -> dict[str, object]:
    from megatron.core import parallel_state

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.checkpoint import load_training_state, prepare_save
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    initialize(config)
    policy = build_policy(config)
    weights = HubWeights(policy.chunks, config.model.architecture)
    tensors = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    fill(weights, tensors)
    policy.optimizer.reload_model_params()
    is_exact = is_gathered_exactly(weights, tensors)
    not_served = {strategy: count_not_served(policy, weights, tensors, strategy) for strategy in strategies}
    grpo, groups = PolicyGradient(config.algorithm, 32), make_groups(config.model.architecture.vocab_size)
    (update,) = make_updates(config, grpo, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    statistics = train_step.update(policy, grpo, update.micro_batches(grpo.needs), lr=1e-3)
    after = dict(weights.gather(dtype=torch.float32))
    folder.mkdir(exist_ok=True)
    prepare_save(policy, 1, folder)()
    dist.barrier()
    held = [tensor.clone() for tensor in optimizer_tensors(policy.optimizer)]
    differences = differences_to_megatron(policy, folder)
    for tensor in (*policy.parameters(), *optimizer_tensors(policy.optimizer)):
        tensor.data.fill_(7.0)
    restored_step = load_training_state(policy, folder)
    restored = dict(weights.gather(dtype=torch.float32))
    state_is_equal = all(map(torch.equal, held, optimizer_tensors(policy.optimizer)))
    bad_buffers = count_bad_gradients(policy)
    again = train_step.update(policy, grpo, update.micro_batches(grpo.needs), lr=1e-3)
    uneven = [flat(update_on(policy, grpo, groups[:number], is_last=number == 2)) for number in (1, 3, 2)]
    at_the_end = dict(weights.gather(dtype=torch.float32))
    if other:
        copy_state(build_policy(config), other, folder.with_name("copy"))
    result = {
        "round_trip_exact": is_exact,
        "not_served": not_served,
        "statistics": flat(statistics),
        "second": flat(again),
        "uneven": uneven,
        "balance": balanced(config, tensors, grpo, groups),
        "bad_buffers": bad_buffers,
        "restored_step": restored_step,
        "state_restored_equal": state_is_equal,
        "differences_to_megatron": differences,
        "logprobs": gathered_logprobs(update),
    }
    if dist.get_rank() == 0:
        result["restored_equal"] = all(torch.equal(after[name], restored[name]) for name in after)
        result["at_the_end"] = {name: float(t.double().norm()) for name, t in at_the_end.items()}
    dist.destroy_process_group()
    return result


def count_not_served(policy, weights, tensors, strategy: str) -> list[int]:
    """Return of engines' weights: shards not seen, wrong, changed for good; other digests, sent and received otherwise.

    Engines get whole tensors through the quantiser. Each layer is looked at when its forward pass begins, the rest
    before; and all of it when the pass is over.
    """
    from posttrain.checkpoint.quantization.quantized_names import layer_of
    from posttrain.rl.megatron_backend.quantized_weights import QuantizedWeights

    values, held = as_served(weights, tensors, strategy)
    shards, wrong = values.shards, {}

    def look(number: int | None) -> None:
        for shard in (shard for shard in shards if layer_of(shard.hf_name) == number):
            part, place = held[shard.hf_name][shard.where], (shard.hf_name, shard.corner)
            is_wrong = not torch.equal(shard.values, part.to(shard.values.dtype))
            wrong[place] = wrong.get(place, False) or is_wrong

    hooks, before = [], [shard.values.clone() for shard in shards]
    with QuantizedWeights(policy, values).lent():
        look(None)
        for layer in (layer for chunk in policy.chunks for layer in chunk.decoder.layers):
            hooks.append(layer.register_forward_pre_hook(lambda layer, _: look(layer.layer_number - 1)))
        forward_once(policy)
    for hook in hooks:
        hook.remove()
    changed = sum(not torch.equal(shard.values, own) for shard, own in zip(shards, before, strict=True))
    differing = count_other_digests(values, held), count_sent_otherwise(values, weights, tensors, strategy)
    differing += (count_received_otherwise(policy.config, values, weights, tensors, held, strategy),)
    return [len(shards) - len(wrong), sum(wrong.values()), changed, *differing]


def count_other_digests(values, held) -> int:
    """Return how many tensors have another digest as shards of all ranks than whole."""
    from posttrain.rl.weight_sync.proof import Digests
    from posttrain_weights.box import whole_box
    from posttrain_weights.digest import Digester
    from posttrain_weights.transfer_plan import EngineSlice

    dtypes = {name: "bfloat16" if name.endswith("norm.weight") else "float32" for name in held}
    parts = [EngineSlice(name, whole_box(tensor.shape), dtypes[name]) for name, tensor in held.items()]
    expected = [tensor.to(getattr(torch, dtypes[name])) for name, tensor in held.items()]
    found = Digests(b"key", parts, torch.device("cpu"))
    found.add_all(values)
    whole = Digester.of_parts(b"key", expected, [(0, 0)] * len(parts))
    return int((found.total() != whole).any(1).sum())


def count_sent_otherwise(values, weights, tensors, strategy: str) -> int:
    """Return how many tensors are sent with other bits than they have when they are quantised in one piece."""
    from posttrain.checkpoint.quantization.fp8 import Fp8Format

    trained = {name: tensors[name] for name in weights.names}
    expected = quantised(trained, Fp8Format(strategy)) if strategy else trained
    sent = dict(values.gather())
    assert [*sent] == [*expected]
    if dist.get_rank() != 0:
        return sum(tensor is not None for tensor in sent.values())
    return sum(not equal_bits(tensor, expected[name]) for name, tensor in sent.items())


def count_received_otherwise(config, values, weights, tensors, held, strategy: str, num_ranks: int = 3) -> int:
    """Return how many parts of engines' ranks have other bits than the whole tensors after two sharded transfers."""
    from tests.support.loopback_engines import LoopbackEngines

    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.sharded import ShardedTransfer

    sent = {name: (spec.shape, spec.dtype) for name, spec in values.sent_specs.items()}
    is_first = dist.get_rank() == 0
    engines = LoopbackEngines(sent, 2, num_ranks) if is_first else None
    with asyncio.Runner() as runner:
        engine_shards = EngineShards(values, engines, runner)
        transfer = ShardedTransfer(config, engine_shards, round_bytes=1 << 14)
        for version in (1, 2):
            digests = transfer.send(version, begin_digests=partial(begin_digests, engine_shards)).total()
    if engines is None:
        return 0
    assert engines.version == 2
    return received_otherwise(engines, weights, tensors, held, strategy, digests)


def begin_digests(engine_shards):
    from posttrain.rl.weight_sync.proof import Digests

    return Digests(b"key", engine_shards.held.parts, torch.device("cpu"))


def received_otherwise(engines, weights, tensors, held, strategy: str, digests=None) -> int:
    """Return how many parts of engines have other bits, or had other digests, than the whole tensors.

    These are quantised in one piece.
    """
    from tests.support.loopback_engines import cut_from

    from posttrain.checkpoint.quantization.fp8 import Fp8Format
    from posttrain.rl.weight_sync.engine_layout import CODES
    from posttrain_weights.digest import Digester

    codes = quantised({name: tensors[name] for name in weights.names}, Fp8Format(strategy)) if strategy else {}
    is_kept_as_codes = {part.name for rank in engines.ranks for part in rank.parts if part.dtype == CODES}

    def expected(part):
        is_scale = part.name not in held
        return cut_from((codes if is_scale or part.name in is_kept_as_codes else held)[part.name], part)

    num_wrong = sum(rank.count_wrong(expected) for rank in engines.ranks)
    if digests is None:
        return num_wrong
    parts = [*dict.fromkeys(part for rank in engines.ranks for part in rank.parts)]
    corners = [(part.box.row, part.box.column) for part in parts]
    whole = Digester.of_parts(b"key", [expected(part) for part in parts], corners)
    return num_wrong + int((digests != whole).any(1).sum())


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def as_served(weights, tensors, strategy: str):
    """Return what engines have of each rank's shards, and of whole tensors: quantised in one piece, and back."""
    from posttrain.checkpoint.quantization.fp8 import Fp8Format, dequantize
    from posttrain.rl.megatron_backend.served_values import ServedValues

    if not strategy:
        return ServedValues(weights, None), {name: tensors[name] for name in weights.names}
    served = Fp8Format(strategy)
    sent, suffix = quantised(tensors, served), served.scale_suffix
    held = {name: dequantize(t, sent[name + suffix]) if name + suffix in sent else t for name, t in sent.items()}
    return ServedValues(weights, served), {name: held[name] for name in weights.names}


def forward_once(policy) -> None:
    """Compute the log-probabilities of a few samples."""
    from megatron.core import parallel_state

    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    groups = make_groups(policy.config.model.architecture.vocab_size)
    grpo, rank = PolicyGradient(policy.config.algorithm, 32), parallel_state.get_data_parallel_rank()
    (update,) = make_updates(policy.config, grpo, groups, rank)
    train_step.compute_logprobs(policy, update.batches)


def gathered_logprobs(update) -> dict[str, list[float]]:
    """Return the log-probabilities of all ranks' responses, by the samples' numbers."""
    from megatron.core import parallel_state

    mine: dict = {}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for batch, row in zip(update.batches, update.old_logprobs, strict=False):
            mine |= {i: v.tolist() for i, v in batch.response_values(row).items()}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {str(i): v for part in everybody for i, v in part.items()}


def update_on(policy, objective, groups, is_last: bool):
    """Make an update of its own number of micro-batches."""
    from megatron.core import parallel_state

    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    (update,) = make_updates(policy.config, objective, groups, parallel_state.get_data_parallel_rank())
    update = update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches))
    return train_step.update(policy, objective, update.micro_batches(objective.needs), lr=1e-3, is_last=is_last)


def balanced(config, tensors, objective, groups) -> dict[str, object]:
    """Make an update that is asked to balance the experts, and say how it went."""
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights

    optimizer = dataclasses.replace(config.optimizer, moe_aux_loss_coeff=10.0, router_bias_update_rate=0.01)
    policy = build_policy(dataclasses.replace(config, optimizer=optimizer))
    weights = HubWeights(policy.chunks, config.model.architecture)
    fill(weights, tensors)
    policy.optimizer.reload_model_params()
    statistics = update_on(policy, objective, groups, is_last=True)
    biases = {
        name: (tensor - tensors[name]).tolist()
        for name, tensor in weights.gather(dtype=torch.float32)
        if name.endswith("e_score_correction_bias") and tensor is not None
    }
    return {"grad_norm": statistics.grad_norm, "load": policy.expert_load.take(), "biases": biases}


def flat(statistics) -> dict[str, object]:
    row = dataclasses.asdict(statistics)
    return row | row.pop("named") | {"outcome": row["outcome"] == "applied"}


def count_bad_gradients(policy) -> int:
    """Spoil one gradient of the last rank, of an expert where experts are spread, and let all ranks count."""
    from posttrain.rl.megatron_backend.train_step import _count_non_finite_gradients

    if dist.get_rank() == dist.get_world_size() - 1:
        chunk = policy.wrapped[-1]
        last = [*chunk.buffers, *chunk.expert_parallel_buffers][-1]
        last.grad_data[-1] = math.nan
    return _count_non_finite_gradients(policy)


def copy_state(fresh, other: Path, copy: Path) -> None:
    """Load the state of another layout into a policy that has made no step, and save it."""
    from posttrain.rl.megatron_backend.checkpoint import load_training_state, prepare_save

    load_training_state(fresh, other)
    copy.mkdir(exist_ok=True)
    prepare_save(fresh, 1, copy)()


def optimizer_tensors(optimizer) -> Iterator[torch.Tensor]:
    """Yield moments and, where they are not the weights themselves, the FP32 master copies."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        for group in part.shard_fp32_from_float16_groups:
            yield from group


def differences_to_megatron(policy, folder: Path) -> list[str]:
    """Return the keys whose stored state is not, bit by bit, what Megatron's own exchange gathers on this rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
    from posttrain.rl.megatron_backend.checkpoint import sharded_weights

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
    metadata["chained_optim_avoid_prefix"] = True
    gathered = policy.optimizer.sharded_state_dict(sharded_weights(policy.chunks), metadata=metadata)
    apply_factories(gathered)
    tensors, _ = extract_matching_values(gathered, lambda value: isinstance(value, ShardedTensor))
    reader, different, num_keys = TorchDistReader(folder), [], 0
    for expected in nested_values(tensors):
        sizes = (1,) * expected.prepend_axis_num + expected.local_shape
        stored = reader.read(expected.key, expected.global_offset, sizes)
        num_keys += 1
        different += [] if torch.equal(stored, expected.data.view(sizes)) else [expected.key]
    return different if num_keys else ["nothing was gathered"]


def is_gathered_exactly(weights, tensors) -> bool:
    return digest(weights.gather()) == digest((name, tensors[name]) for name in weights.names)


def digest(named) -> str:
    state = hashlib.sha256()
    for name, tensor in named:
        if tensor is not None:
            state.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


if __name__ == "__main__":
    main()
