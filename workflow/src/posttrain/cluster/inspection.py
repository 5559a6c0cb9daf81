"""The head's preflight of a gang: it queries all nodes, compares their answers, and names the unfit ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import store
from posttrain.config.schema import Config
from posttrain.plan.preflight.judgement import (
    Unfit,
    judge_clocks,
    judge_facts,
    judge_links,
    judge_reach,
    judge_transfers,
    summarize,
)
from posttrain.plan.preflight.versions import pinned_versions, untested

log = logging.getLogger(__name__)

CLOCK, FACTS, REACH, LINKS, KV_TRANSFER = "clock", "facts", "reach", "links", "kv_transfer"
FILE_NAME = "preflight.json"

Ask = Callable[..., Mapping[str, dict[str, Any]]]
"""`ask(kind, **content)` sends a request to every node and returns node -> answer, in the order of ranks."""


class UnfitNodesError(RuntimeError):
    """Some nodes are unfit to train.

    Args:
        unfit: Node -> reasons.
    """

    def __init__(self, unfit: Unfit):
        self.unfit = unfit
        super().__init__("; ".join(f"{name} is unfit: {', '.join(reasons)}" for name, reasons in unfit.items()))


def describe_unfit(unfit: Unfit, config: Config) -> str:
    """Return a message with each unfit node's reasons and a remedy."""
    found = "".join(f"\n  {name}: {', '.join(reasons)}" for name, reasons in unfit.items())
    ways_out = {
        "slurm": f", or site.slurm.extra_options: ['--exclude={','.join(unfit)}']",
        "kubernetes": f", or kubectl cordon {' '.join(unfit)}",
    }
    return f"unfit to train:{found}\n  remedy: repair them{ways_out.get(config.site.launcher, '')}"


def must_inspect(config: Config, names: Sequence[str]) -> bool:
    """Return whether the preflight is enabled and there are GPUs, or links between nodes, to test."""
    return config.launch.preflight and (len(names) > 1 or config.hardware.device == "cuda")


def inspect(ask: Ask, config: Config, addresses: Mapping[str, str], folder: Path) -> None:
    """Run the preflight on all nodes of an attempt.

    Args:
        ask: Sends a request to every node and returns the answers.
        config: The resolved configuration.
        addresses: Node -> its address for other nodes, in the order of ranks.
        folder: Folder of the attempt; gets `preflight.json`, also if nodes are unfit.

    Raises:
        UnfitNodesError: Some nodes are unfit.
    """
    started = time.monotonic()
    found: dict[str, Any] = {}
    share = config.launch.preflight_min_share
    try:
        found["clocks"] = offsets = _clock_offsets(ask)
        _refuse(judge_clocks(offsets))
        answers = ask(FACTS)
        found["nodes"] = facts = {name: answer["facts"] for name, answer in answers.items()}
        _refuse(judge_facts(facts, share))
        places = [(addresses[name], answer["port"]) for name, answer in answers.items()]
        _refuse(judge_reach({name: answer["unreachable"] for name, answer in ask(REACH, places=places).items()}))
        rendezvous = next(iter(answers.values()))["rendezvous"]
        measured = ask(LINKS, address=places[0][0], rendezvous=rendezvous)
        found["links"] = results = {name: answer["results"] for name, answer in measured.items()}
        _refuse(judge_links(results, share))
        if config.engine.pd.num_prefill_engines and len(addresses) > 1:
            places = [(addresses[name], answer["transfer"]) for name, answer in answers.items()]
            sent = {name: answer["results"] for name, answer in ask(KV_TRANSFER, places=places).items()}
            found[KV_TRANSFER] = sent
            _refuse(judge_transfers(sent, config.engine.pd.transfer_backend, share))
    finally:
        store.write_json(folder / FILE_NAME, found)
    seconds = time.monotonic() - started
    rates = summarize(facts, results, found.get(KV_TRANSFER, {}))
    log.info("preflight: %d nodes are fit, after %.1f s: %s", len(addresses), seconds, rates)
    if others := untested(next(iter(facts.values()))["versions"], pinned_versions(config)):
        log.warning("these versions were not tested together: %s", ", ".join(others))


def _clock_offsets(ask: Ask) -> dict[str, float]:
    """Return a lower bound of each clock's offset from this one's in seconds; negative: behind, 0: within the error."""
    before = time.time()
    told = {name: float(answer["seconds"]) for name, answer in ask(CLOCK).items()}
    after = time.time()
    return {name: max(0.0, seconds - after) + min(0.0, seconds - before) for name, seconds in told.items()}


def _refuse(unfit: Unfit) -> None:
    if unfit:
        raise UnfitNodesError(unfit)
