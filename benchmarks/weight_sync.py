"""Weights from trainer ranks to engine ranks: how fast one pair of them is, who sends how much, and what follows.

    python -m benchmarks.weight_sync

Measured: one process quantises nothing and sends parts of matrices to another, which writes them where they belong, by
the way that a training takes (`posttrain_weights`); beside it, one `memcpy` of as many bytes. Counted: what
each of 128 trainer ranks sends of GLM-5 to two engines of 64 ranks, whose attention is data-parallel. Simulated
(`benchmarks.update_simulation`): how long that takes where engines have 16 nodes of their own, through the host's
memory, and from GPU to GPU; and what is published of prime-rl.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks import update_simulation as published
from benchmarks.claims import report, start
from benchmarks.update_simulation import (
    PrimeRl,
    between_gpus,
    digesting,
    prime_rl,
    proof_seconds,
    seconds_of,
    through_host,
)
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.fp8 import quantize_block
from posttrain.checkpoint.quantization.quantized_names import layer_of
from posttrain.config.derived import update_bytes_at_once
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.plan.timing.decoding import decode_step_seconds, prefill_seconds
from posttrain.plan.timing.rates import PROMPT_TOKENS
from posttrain.plan.timing.rollout_of_step import engine_of
from posttrain.plan.timing.step_time import sync_seconds
from posttrain.rl.weight_sync.publish import served_format
from posttrain_weights import digest_triton
from posttrain_weights.box import Box, whole_box
from posttrain_weights.channel import CPU, Channel
from posttrain_weights.delta import HEADER_BYTES, change, changes
from posttrain_weights.digest import Digester, octets_of
from posttrain_weights.messages import size_of
from posttrain_weights.receiver import Receiver
from posttrain_weights.sender import Sender
from posttrain_weights.transfer_plan import EngineSlice, SliceTransfer, plan_transfer, spread
from posttrain_weights.transport import Place, rendezvous

CONFIG_DIR = Path(__file__).parents[1] / "config"
# Codes of an expert's projection of GLM-5, of which a message has as many as fill a round.
ROWS, COLUMNS, PARTS, ROUNDS, REPEATS = 2048, 6144, 8, 8, 5
# About as many as a rank of an engine keeps of GLM-5.
HOST_PARTS = 4000
CHANGED = 0.02
DTYPES = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
EXPERT = re.compile(r"experts\.(\d+)\.")
GB = 1e9
# Share that the plan's seconds may be off by.
MOST_OFF = 0.25


def main() -> None:
    """Print the tables, and a line of JSON for each claim."""
    (shared, _), (rate, copied) = measure_pair(one_host=True), measure_pair(one_host=False)
    print("one sender, one receiver, GB/s of parts packed, sent and written: ", end="")
    print(f"{shared:.2f} over memory that both share, {rate:.2f} over gloo; memcpy {copied:.2f} GB/s")
    config = resolve({"model": "glm5", "nodes": 16, "site": "local"}, CONFIG_DIR).config
    started = time.process_time()
    held, holders = layout_of(config, senders=128, stages=4, cut=4, receivers=64, engines=2)
    transfers = plan_transfer(held, holders, update_bytes_at_once(config))
    seconds = time.process_time() - started
    total, most = totals(transfers)
    print(
        f"GLM-5, 128 to 128 ranks: {len(transfers)} transfers planned in {seconds:.1f} s, {total / GB:,.0f} GB, ",
        end="",
    )
    print(f"the busiest sends {most / GB:.1f} GB, {spread(transfers, 128):.2f} of the mean")
    report("share of memcpy's rate of one sender and one receiver, over gloo", rate / copied, 0.1, at_least=True)
    report("the same over memory that both share", shared / copied, 0.2, at_least=True)
    report("GB that an engine rank of GLM-5 gets, over what it keeps", received(transfers, held), 1.05)
    report("seconds in which a rank decides who sends what of GLM-5, once", seconds, 30)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        share, finding, writing = measure_changes(dtype)
        print(f"{dtype}, 2 % of it changed: found at {finding:.2f} GB/s, written at {writing:.2f} GB/s of the part")
        report(f"share of a part's bytes, {dtype}, 2 % of it changed", share, 0.1)
    show_prime_rl(found := simulate_prime_rl())
    show_apart(config, transfers, rate * GB, found.beside)


def quick() -> None:
    """What has changed of a small part, and who sends what of the demo's model."""
    share, _, _ = measure_changes(torch.bfloat16, rows=64, columns=64, repeats=1)
    report("share of a part's bytes, 2 % of it changed", share, 0.1)
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    held, holders = layout_of(config, senders=4, stages=1, cut=2, receivers=2)
    transfers = plan_transfer(held, holders, update_bytes_at_once(config))
    report("bytes that an engine rank of the demo gets, over what it keeps", received(transfers, held), 1.05)


def simulate_prime_rl() -> PrimeRl:
    """Simulate an update of prime-rl: GLM-5.2 in BF16, each tensor cut by rows among ranks that also share the experts.

    Their ranks have a 64th of each tensor. Here eight have an eighth, and send what is a 64th of it in the end.
    """
    asked = {"model": "glm5.2", "nodes": 16, "site": "local", "set": "rollout.fp8=false"}
    config = resolve(asked, CONFIG_DIR).config

    def of_engine(num_ranks: int) -> list[SliceTransfer]:
        return plan_transfer(*layout_of(config, senders=64, stages=1, cut=8, receivers=num_ranks), round_bytes=1 << 40)

    return prime_rl(config.hardware, of_engine)


def show_prime_rl(found: PrimeRl) -> None:
    """Print what is simulated of prime-rl beside what is published, and claims."""
    rows = (
        ("GB that an engine rank fetches", found.bytes / GB, published.BYTES / GB),
        ("seconds in which it has fetched them", found.fetched, published.FETCHED),
        ("seconds of the engines' update", found.update, published.UPDATE),
        ("seconds of all, its pause as published", found.update + published.PAUSE, published.ALL),
    )
    print(f"prime-rl; of the update {found.beside:.2f} s are what EP16 takes beside fetching and loading")
    for name, ours, theirs in rows:
        print(f"    {name:40}{ours:8.3f}, published {theirs:.3f}")
    for name, ours, theirs in rows:
        report(f"prime-rl, {name}: simulated, off by", abs(ours / theirs - 1), 0.2)


def show_apart(config: Config, transfers: list[SliceTransfer], rate: float, beside: float) -> None:
    """Print how long GLM-5's update takes on 16 nodes of a trainer and 16 of engines, and claims.

    Args:
        config: Of GLM-5.
        transfers: To two engines of 64 ranks.
        rate: Through the host, measured.
        beside: Seconds that an update takes beside sending, prime-rl's.
    """
    kernels = kernels_of_a_part()
    ways = {
        "from GPU to GPU": between_gpus(config.hardware, kernels),
        "through the host's memory": through_host(rate, kernels),
    }
    engine = engine_of(config)
    ranks = engine.prefill_gpus or engine.num_gpus
    digests = digesting(config.hardware, *measure_host_of_digests(config))
    proof = proof_seconds(transfers, ways["from GPU to GPU"], digests)
    token = prefill_seconds(engine, ranks, PROMPT_TOKENS) + decode_step_seconds(engine, ranks, PROMPT_TOKENS)
    print(f"GLM-5 on 16 + 16 nodes: {proof:.3f} s of digests, {token:.2f} s to a first token")
    sent = {name: seconds_of(transfers, way) for name, way in ways.items()}
    for name, seconds in sent.items():
        first = seconds + beside + proof + token
        print(f"    {name:40}{seconds:8.2f} + {beside:.2f} s; the first token after {first:.2f}")
    seconds = sent["from GPU to GPU"]
    report("GLM-5 on 16 + 16 nodes: seconds of the engines' update", seconds + beside, 4)
    report("GLM-5 on 16 + 16 nodes: seconds to the first token", seconds + beside + proof + token, 6)
    report("GLM-5 on 16 + 16 nodes: share of the transfer that digests add", proof / seconds, 0.05)
    report("seconds by the plan, off by", abs(sync_seconds(config, math.inf) / seconds - 1), MOST_OFF)


def kernels_of_a_part() -> int:
    """Return the kernels that quantise a part, counted."""
    with _Counted() as counted:
        quantize_block(torch.zeros(256, 256, dtype=torch.bfloat16))
    return counted.number


def measure_host_of_digests(config: Config) -> tuple[float, float]:
    """Return the host's seconds for a part that a GPU digests, and for a version's factors; medians."""
    specs = expected_tensors(config.model.architecture).values()
    codes = torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
    parts, of_parts, of_keys = [codes[:] for _ in range(HOST_PARTS)], [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        table = digest_triton.described([octets_of(part) for part in parts], [(0, 0)] * HOST_PARTS)
        for is_aligned in (True, False):
            digest_triton.tiles_of(table, is_aligned)
        of_parts.append((time.perf_counter() - started) / HOST_PARTS)
        most_rows, widest = max(spec.shape[0] for spec in specs), max(4 * spec.shape[-1] for spec in specs)
        started = time.perf_counter()
        _ = Digester(bytes(32), most_rows, widest).factors
        of_keys.append(time.perf_counter() - started)
    return statistics.median(of_parts), statistics.median(of_keys)


class _Counted(TorchDispatchMode):
    """Counts what makes tensors or changes them; views cost no kernel."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(made.alias_info and not made.alias_info.is_write for made in func._schema.returns)
        self.number += not is_view
        return func(*args, **kwargs or {})


def measure_pair(one_host: bool) -> tuple[float, float]:
    """Return GB/s of a transfer between two processes, on one host or as if not, and of a copy in memory; medians."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/meeting"
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_receive, args=(place, one_host))
        other.start()
        rates = _send(place)
        other.join()
    source = torch.zeros(ROUNDS * PARTS * ROWS * COLUMNS, dtype=torch.uint8)
    target, copies = torch.ones_like(source), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        target.copy_(source)
        copies.append(len(source) / GB / (time.perf_counter() - started))
    return statistics.median(rates), statistics.median(copies)


def measure_changes(
    dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS, repeats: int = REPEATS
) -> tuple[float, float, float]:
    """Return the share of a part's bytes that its changes take, and GB/s of finding and of writing them; medians."""
    torch.set_num_threads(1)
    old = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8).view(dtype)
    bits = old.clone().view(torch.uint8)
    changed = torch.rand(rows, columns) < CHANGED
    bits[:, :: dtype.itemsize][changed] ^= 1
    new, finding, writing = bits.view(dtype), [], []
    for _ in range(repeats):
        started = time.perf_counter()
        found = changes(new, old)
        finding.append(old.nbytes / GB / (time.perf_counter() - started))
        assert found is not None
        part, started = old.clone(), time.perf_counter()
        fits = change(part, *found)
        writing.append(old.nbytes / GB / (time.perf_counter() - started))
        assert fits
        assert torch.equal(part.view(torch.uint8), bits)
    assert found is not None
    sizes = [size_of(1, piece.shape[1], piece.element_size()) for piece in found]
    size = sum(sizes) + HEADER_BYTES
    return size / old.nbytes, statistics.median(finding), statistics.median(writing)


def _send(place: str) -> list[float]:
    torch.set_num_threads(1)
    channel = Channel(rendezvous(place, 2, 60), 0, 2, 60)
    sender = Sender(channel, {}, PARTS * ROWS * COLUMNS, [1])
    table = [[r, r * PARTS + p, 0, 0, ROWS, COLUMNS] for r in range(ROUNDS) for p in range(PARTS)]
    channel.send_table(torch.tensor(table), 1)
    parts = torch.randint(0, 256, (PARTS, ROWS, COLUMNS), dtype=torch.uint8)
    rates = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        begun = list[Any]()
        for number in range(ROUNDS):
            messages = sender.pack(number, {1: [*parts]})
            if begun:
                begun.pop().wait()
            begun.append(sender.begin(number, messages))
        begun.pop().wait()
        channel.receive_table(1)
        rates.append(ROUNDS * parts.numel() / GB / (time.perf_counter() - started))
    return rates[1:]


def _receive(place: str, one_host: bool) -> None:
    torch.set_num_threads(1)
    own = Place.of(CPU)
    channel = Channel(rendezvous(place, 2, 60), 1, 2, 60, place=own if one_host else own._replace(host="another"))
    receiver = Receiver(channel, [0])
    views = [*torch.zeros(ROUNDS * PARTS, ROWS, COLUMNS, dtype=torch.uint8)]
    for _ in range(REPEATS + 1):
        receiver.receive(views)
        channel.send_table(torch.zeros(1, 1, dtype=torch.int64), 0)


Holders = dict[str, dict[Box, list[int]]]


def layout_of(
    config: Config, senders: int, stages: int, cut: int, receivers: int, engines: int = 1
) -> tuple[list[list[EngineSlice]], Holders]:
    """Return what each engine rank keeps, and which trainer ranks have what.

    Args:
        config: The resolved configuration.
        senders: Trainer ranks, in stages of consecutive ones.
        stages: Of the pipeline.
        cut: Tensor-parallel ranks of a stage; experts are spread over all of it.
        receivers: Ranks of an engine: each has all of attention, and its share of the experts.
        engines: All alike.
    """
    arch, served = config.model.architecture, served_format(config)
    held: list[list[EngineSlice]] = [[] for _ in range(receivers)]
    holders: Holders = {}
    of_stage, experts = senders // stages, arch.n_routed_experts
    for name, spec in expected_tensors(arch).items():
        if (layer := layer_of(name)) is not None and layer >= arch.num_hidden_layers:
            continue
        is_last = layer is None and "embed" not in name
        first = of_stage * (stages - 1 if is_last else (layer or 0) * stages // arch.num_hidden_layers)
        includes = served is not None and served.selection.includes(name, spec.shape)
        for sent, sent_spec in (served.served_specs(name, spec) if served and includes else {name: spec}).items():
            whole, dtype = whole_box(sent_spec.shape), DTYPES[sent_spec.dtype]
            if found := EXPERT.search(name):
                number = int(found[1])
                held[number * receivers // experts].append(EngineSlice(sent, whole, dtype))
                holders[sent] = {whole: [first + number * of_stage // experts]}
                continue
            for keeper in held:
                keeper.append(EngineSlice(sent, whole, dtype))
            num_cuts = cut if whole.rows > cut and whole.rows % cut == 0 else 1
            rows = whole.rows // num_cuts
            holders[sent] = {
                Box(i * rows, 0, rows, whole.columns): [
                    first + rank for rank in range(of_stage) if num_cuts == 1 or rank % cut == i
                ]
                for i in range(num_cuts)
            }
    return held * engines, holders


def totals(transfers: list[SliceTransfer]) -> tuple[int, int]:
    """Return bytes that are sent by all, and by the busiest."""
    sent: dict[int, int] = {}
    for transfer in transfers:
        sent[transfer.sender] = sent.get(transfer.sender, 0) + transfer.num_bytes
    return sum(sent.values()), max(sent.values())


def received(transfers: list[SliceTransfer], held: list[list[EngineSlice]]) -> float:
    """Return what the ranks of an engine get, over what they keep; the worst of them."""
    got = [0] * len(held)
    for transfer in transfers:
        got[transfer.receiver] += transfer.num_bytes
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    kept = [sum(part.box.rows * part.box.columns * sizes[part.dtype] for part in parts) for parts in held]
    return max(g / k for g, k in zip(got, kept, strict=True))


if __name__ == "__main__":
    start(main, quick)
