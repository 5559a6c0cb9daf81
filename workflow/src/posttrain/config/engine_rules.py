"""Rules of the engines' keys that SGLang would check only after loading weights, or not at all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from posttrain.config.derived import (
    engine_gpus,
    engine_nodes,
    prefill_gpus,
    room_for_engines,
    takes_turns,
    uses_engines,
    weight_transport,
)
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.readable import counted

Problems = Iterator[Problem]
# SGLang 0.5.23, `layers/moe/token_dispatcher/deepep.py`: a rank sends fewer tokens than this to another per dispatch.
DEEPEP_MAX_TOKENS = 1024


def _world_size(config: Config) -> Problems:
    if not _is_sglang_on_gpus(config):
        return
    per_node = config.hardware.gpus_per_node
    for key, ranks in _world_sizes(config):
        if ranks > per_node and ranks % per_node:
            allowed = f"at most {per_node}, or a multiple of it (hardware.gpus_per_node)"
            yield Problem("engine-spans-part-of-a-node", key, str(ranks), allowed, "let an engine span whole nodes")


def _nodes_of_an_engine(config: Config) -> Problems:
    """Check engines on CPUs; on GPUs the planner reports missing GPUs."""
    ranks, there = config.engine.gpus_per_engine, room_for_engines(config)
    is_served = config.engine.kind == "sglang" and config.hardware.device == "cpu" and uses_engines(config)
    if is_served and ranks > there:
        allowed = f"at most {there}: ranks on {counted(len(engine_nodes(config)), 'node')} (hardware.gpus_per_node)"
        remedy = "use fewer ranks per engine, or more nodes"
        yield Problem("engine-exceeds-nodes", "engine.gpus_per_engine", str(ranks), allowed, remedy)


def _engine_experts(config: Config) -> Problems:
    ranks, count = config.engine.gpus_per_engine, config.model.architecture.n_routed_experts
    if _is_sglang_on_gpus(config) and count % ranks:
        allowed = f"a divisor of {count} (n_routed_experts), which are spread over an engine's GPUs"
        yield Problem(
            "engine-divides-experts", "engine.gpus_per_engine", str(ranks), allowed, "choose one that divides it"
        )


def _prefill_experts(config: Config) -> Problems:
    ranks, count = config.engine.pd.gpus_per_prefill_engine, config.model.architecture.n_routed_experts
    if config.engine.pd.num_prefill_engines and _is_sglang_on_gpus(config) and count % ranks:
        allowed = f"a divisor of {count} (n_routed_experts), which are spread over an engine's GPUs"
        remedy = "choose one that divides it"
        yield Problem("engine-divides-experts", "engine.pd.gpus_per_prefill_engine", str(ranks), allowed, remedy)


def _tensor_parallel_attention(config: Config) -> Problems:
    arch = config.model.architecture
    has_experts = arch.n_routed_experts > 0
    # SGLang 0.5.23 splits the heads of delta nets (`models/qwen3_5.py`) and of the vision tower (`layers/attention/
    # vision.py`) over the same ranks.
    split = {
        "num_attention_heads": arch.num_attention_heads,
        "linear_num_key_heads": arch.linear_num_key_heads,
        "vision.num_heads": arch.vision.num_heads,
    }
    if not _is_sglang_on_gpus(config) or (config.engine.dp_attention and has_experts):
        return
    for (key, ranks), (name, heads) in itertools.product(_world_sizes(config), split.items()):
        if heads % ranks:
            allowed = f"a divisor of {heads} ({name}), which tensor-parallel attention splits"
            remedy = "choose one that divides it, or use data-parallel attention"
            yield Problem("engine-divides-heads", key, str(ranks), allowed, remedy)


def _speculation(config: Config) -> Problems:
    steps, key = config.engine.mtp_steps, "engine.mtp_steps"
    if not steps:
        return
    if not config.model.architecture.num_nextn_predict_layers:
        yield Problem("no-mtp-layer", key, str(steps), "0 for a model without an MTP layer", "leave speculation off")
    if not _is_sglang_on_gpus(config):
        where = "a CPU" if config.hardware.device == "cpu" else "the embedded engine"
        yield Problem(
            "engine-cannot-draft", key, str(steps), f"0 on {where}, which cannot draft", "leave speculation off"
        )
    if not config.hardware.kernels.speculative:
        allowed = f"0 on {config.hardware.name} (hardware.kernels.speculative)"
        yield Problem("no-speculative-kernel", key, str(steps), allowed, "leave speculation off")


def _chosen_keys(config: Config) -> Problems:
    arch, other = config.model.architecture, config.hardware.kernels.attention
    if other and arch.index_n_heads and _is_sglang_on_gpus(config) and uses_engines(config):
        allowed = f"another kernel: {other} attends to all keys, the trainer only to those that the model chooses"
        remedy = "train on GPUs for which SGLang has sparse-attention kernels"
        yield Problem("attention-reads-all-keys", "hardware.kernels.attention", other, allowed, remedy)


def _routing_replay(config: Config) -> Problems:
    key = "algorithm.routing_replay"
    if not config.algorithm.routing_replay or not uses_engines(config):
        return
    if not config.model.architecture.n_routed_experts:
        yield Problem("replay-without-experts", key, "true", "false for a model without experts", "leave it out")
    engine = config.engine
    uses_deepep = engine.deepep and config.hardware.deepep and config.rollout.fp8
    if engine.mtp_steps and engine.dp_attention and not uses_deepep:
        # SGLang 0.5.23, `get_dp_local_slice_cpu`: in a CUDA graph a rank's rows of the buffer of all ranks start at
        # its number times the graph's requests, though a request has several tokens. With DeepEP they start at 0.
        allowed = "false with engine.mtp_steps and data-parallel attention without DeepEP: SGLang mixes up tokens"
        remedy = "engine.deepep=true with rollout.fp8, engine.dp_attention=false, or no speculation"
        yield Problem("replay-with-drafts", key, "true", allowed, remedy)


def _disaggregation(config: Config) -> Problems:
    engine, key = config.engine, "engine.pd.num_prefill_engines"
    count = engine.pd.num_prefill_engines
    if not count:
        return
    if engine.kind != "sglang":
        yield Problem(
            "prefill-needs-sglang", key, str(count), "0 without SGLang", "let every engine prefill and decode"
        )
        return
    if config.hardware.device == "cpu":
        return
    if engine_gpus(config) > room_for_engines(config):
        found = f"{count} x {engine.pd.gpus_per_prefill_engine} GPUs beside {engine.num_engines} x "
        nodes = counted(len(engine_nodes(config)), "node")
        allowed = f"at most {room_for_engines(config)} GPUs together ({nodes})"
        yield Problem(
            "engines-exceed-gpus", key, f"{found}{engine.gpus_per_engine}", allowed, "fewer or smaller engines"
        )
    unit = min(engine.gpus_per_engine, config.hardware.gpus_per_node)
    if prefill_gpus(config) % unit:
        allowed = f"a multiple of {unit} GPUs: those that decode come behind, each on whole nodes or within one"
        found = f"{count} x {engine.pd.gpus_per_prefill_engine} GPUs"
        yield Problem("prefill-splits-nodes", key, found, allowed, "another number or size of them")


def _deepep_buffers(config: Config) -> Problems:
    engine = config.engine
    tokens = engine.graph_batch_size * (engine.mtp_steps + 1)
    if engine.deepep and config.rollout.fp8 and _is_sglang_on_gpus(config) and tokens > DEEPEP_MAX_TOKENS:
        most = DEEPEP_MAX_TOKENS // (engine.mtp_steps + 1)
        allowed = f"at most {most} with engine.mtp_steps={engine.mtp_steps} and DeepEP"
        remedy = "lower it, or engine.mtp_steps"
        yield Problem("graph-batch-too-large", "engine.graph_batch_size", str(engine.graph_batch_size), allowed, remedy)


def _determinism(config: Config) -> Problems:
    if config.engine.deterministic and _is_sglang_on_gpus(config) and config.model.architecture.index_n_heads:
        allowed = "false for sparse attention: SGLang 0.5.23 has no kernel of it whose sums are the same in any batch"
        yield Problem("no-deterministic-kernel", "engine.deterministic", "true", allowed, "leave it off")


def _transport(config: Config) -> Problems:
    if config.engine.kind == "embedded" and config.engine.weight_transport == "sharded":
        allowed = "tensor or disk with engine.kind=embedded, which is one process"
        remedy = "set engine.weight_transport=tensor"
        yield Problem("transport-needs-sglang", "engine.weight_transport", "sharded", allowed, remedy)


def _own_nodes(config: Config) -> Problems:
    own, key = config.engine.own_nodes, "engine.own_nodes"
    if not own:
        return
    if not uses_engines(config):
        allowed = f"0 with training.objective={config.training.objective}, which has no engines"
        yield Problem("own-nodes-without-engines", key, str(own), allowed, "leave it out")
    elif own >= config.nodes:
        allowed = f"less than {config.nodes} (nodes): the trainer needs one at least"
        yield Problem("own-nodes-leave-none", key, str(own), allowed, "lower it, or raise nodes")
    elif config.engine.sleep == "always":
        allowed = "auto or never with engine.own_nodes: engines that share no GPU are not offloaded"
        yield Problem("sleep-with-own-nodes", "engine.sleep", "always", allowed, "leave it out")


def _addresses(config: Config) -> Problems:
    key, seen = "evaluation.addresses", set[str]()
    for address in config.evaluation.addresses:
        host, _, port = address.rpartition(":")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", host) or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
            allowed = "host:port, as http://host:port has it"
            yield Problem("not-an-address", key, repr(address), allowed, "name each engine by its host and its port")
        elif address in seen:
            yield Problem("named-twice", key, f"{address} twice", "different engines", "name each engine once")
        seen.add(address)


def _deltas(config: Config) -> Problems:
    key, remedy = "engine.weight_deltas", "set engine.weight_deltas=false"
    if not config.engine.weight_deltas:
        return
    if (way := weight_transport(config)) != "sharded":
        allowed = "engine.weight_transport=sharded"
        yield Problem("deltas-need-sharded", key, f"true, with engine.weight_transport={way}", allowed, remedy)
    elif takes_turns(config):
        allowed = "engines that keep their weights: offloaded ones drop them, so every update sends all of them"
        yield Problem(
            "deltas-need-awake-engines",
            key,
            "true",
            allowed,
            f"{remedy}, or engine.sleep=never where both fit at a time",
        )


def check_cut(config: Config) -> Problems:
    """Yield the reasons why a model cannot be sharded over an engine's GPUs."""
    for rule in (_world_size, _engine_experts, _tensor_parallel_attention):
        yield from rule(config)


def _world_sizes(config: Config) -> list[tuple[str, int]]:
    sizes = [("engine.gpus_per_engine", config.engine.gpus_per_engine)]
    if config.engine.pd.num_prefill_engines:
        sizes.append(("engine.pd.gpus_per_prefill_engine", config.engine.pd.gpus_per_prefill_engine))
    return sizes


def _is_sglang_on_gpus(config: Config) -> bool:
    return config.engine.kind == "sglang" and config.hardware.device == "cuda"


ENGINE_RULES: tuple[Callable[[Config], Problems], ...] = (
    _world_size,
    _nodes_of_an_engine,
    _engine_experts,
    _prefill_experts,
    _tensor_parallel_attention,
    _speculation,
    _chosen_keys,
    _disaggregation,
    _routing_replay,
    _deepep_buffers,
    _transport,
    _deltas,
    _determinism,
    _own_nodes,
    _addresses,
)
