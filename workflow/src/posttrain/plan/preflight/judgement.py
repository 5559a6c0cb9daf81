"""Finds the nodes of a gang that are unfit to train, from all nodes' measurements. Pure functions without measurements.

A node is compared with the others of its gang, so no absolute rate of a network or disk is needed. If two nodes
differ, the one in the minority, or otherwise the slower one, is unfit.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Output of one process of `plan.preflight.links`."""
Results = Mapping[str, Sequence[Rows]]
"""Node, in the order of ranks -> its processes."""

# Logs, lease heartbeats and the order of events depend on clocks.
MAX_CLOCK_SECONDS = 1.0

Unfit = dict[str, list[str]]
"""Node -> why it cannot train."""


def judge_clocks(offsets: Mapping[str, float]) -> Unfit:
    """Find nodes whose clock is off.

    Args:
        offsets: Node -> minimum seconds by which its clock is ahead of the head's; negative if it is behind.
    """
    return {
        name: [f"its clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}"]
        for name, offset in offsets.items()
        if abs(offset) > MAX_CLOCK_SECONDS
    }


def judge_facts(facts: Mapping[str, Mapping[str, Any]], min_share: float) -> Unfit:
    """Find nodes that report problems, have other versions than most, or have a slow disk.

    Args:
        facts: Node -> `NodeFacts.as_dict`.
        min_share: A rate below this share of the median is too low.
    """
    unfit: Unfit = {name: list(said["problems"]) for name, said in facts.items()}
    for what in sorted({what for said in facts.values() for what in said["versions"]}):
        versions = {name: said["versions"].get(what, "not there") for name, said in facts.items()}
        usual, _ = Counter(versions.values()).most_common(1)[0]
        for name, version in versions.items():
            if version != usual:
                unfit[name].append(f"{what} is {version}, {usual} elsewhere")
    for disk in sorted({disk for said in facts.values() for disk in said["rates"]}):
        rates = {name: said["rates"][disk] for name, said in facts.items() if disk in said["rates"]}
        _add_slow(unfit, rates, disk, "MB/s", min_share)
    return {name: reasons for name, reasons in unfit.items() if reasons}


def judge_reach(unreachable: Mapping[str, Sequence[str]]) -> Unfit:
    """Find nodes with failed connections: the smallest set that explains every failure.

    Args:
        unreachable: Node -> the other nodes that it could not connect to.
    """
    broken = {(one, other) for one, others in unreachable.items() for other in others}
    unfit: Unfit = {}
    for name, pairs in _fewest(broken):
        others = sorted({other for pair in pairs for other in pair} - {name})
        unfit[name] = [f"no connection with {', '.join(others)} ({len(pairs)} of the tries failed)"]
    return unfit


def judge_links(results: Results, min_share: float) -> Unfit:
    """Find nodes with slow processors or links, or whose exchange failed first.

    A node's rate is its best exchange: every exchange with a bad node is slow, so its partners are not blamed.

    Args:
        results: Output of every process, including failed ones.
        min_share: A rate below this share of the median is too low.
    """
    names = list(results)
    unfit: Unfit = {name: [] for name in names}
    compute = {name: min(rates) for name in names if (rates := _values(results[name], "compute"))}
    _add_slow(unfit, compute, "a matrix product", "TFLOP/s", min_share)
    links = {name: min(rates) for name in names if (rates := _best_of_each(results[name]))}
    _add_slow(unfit, links, "the network", "MB/s", min_share)
    for name, partner in _first_broken(results, names):
        unfit[name].append(f"an exchange with {partner} broke off")
    return {name: reasons for name, reasons in unfit.items() if reasons}


def judge_transfers(sent: Mapping[str, Rows], backend: str, min_share: float) -> Unfit:
    """Find nodes with failed or slow KV cache transfers: the smallest set that explains every bad transfer.

    Args:
        sent: Node -> output of its process of `plan.preflight.kv_transfer`, in the order of the ring.
        backend: Transfer backend.
        min_share: A rate below this share of the median is too low; a node's better rate counts.
    """
    names = list(sent)
    rates = {name: sum(_values([rows], "rate")) for name, rows in sent.items()}
    around = zip(names[-1:] + names[:-1], names, strict=True)
    median = statistics.median(max(rates[before], rates[name]) for before, name in around)
    bad = {}
    for name, receiver in zip(names, names[1:] + names[:1], strict=True):
        if not rates[name]:
            bad[name, receiver] = f"broke off, see preflight-{name}.log"
        elif not sent[name][-1]["has_arrived"]:
            bad[name, receiver] = "brought other bytes"
        elif rates[name] < min_share * median:
            bad[name, receiver] = f"{rates[name]:,.3g} MB/s, the median is {median:,.3g}"
    return {
        name: [f"KV cache over {backend} from {one} to {other}: {bad[one, other]}" for one, other in sorted(pairs)]
        for name, pairs in _fewest(set(bad))
    }


def summarize(facts: Mapping[str, Mapping[str, Any]], results: Results, sent: Mapping[str, Rows]) -> str:
    """Return the lowest rate of each kind, and what sandboxes have, for one log line.

    Arguments are those of the judgements.
    """
    parts = []
    for disk in sorted({disk for said in facts.values() for disk in said["rates"]}):
        parts.append(f"{disk} {min(said['rates'][disk] for said in facts.values()):,.0f} MB/s")
    links = [rate for processes in results.values() for rate in _values(processes, "rate")]
    sums = [rate for processes in results.values() for rate in _values(processes, "all_reduce")]
    parts += [f"between two nodes {min(links):,.0f} MB/s"] if links else []
    parts += [f"all-reduce {min(sums):,.0f} MB/s"] if sums else []
    caches = _values(list(sent.values()), "rate")
    parts += [f"KV cache {min(caches):,.0f} MB/s"] if caches else []
    return ", ".join([*parts, *sorted({str(said["sandbox"]) for said in facts.values() if said.get("sandbox")})])


def _fewest(broken: set[tuple[str, str]]) -> Iterator[tuple[str, set[tuple[str, str]]]]:
    """Yield names, each with the pairs that it explains, until every broken pair is explained."""
    while broken:
        named = Counter(name for pair in broken for name in pair)
        worst, _ = max(named.items(), key=lambda item: (item[1], item[0]))
        explained = {pair for pair in broken if worst in pair}
        yield worst, explained
        broken = broken - explained


def _add_slow(unfit: Unfit, rates: Mapping[str, float], what: str, unit: str, min_share: float) -> None:
    median = statistics.median(rates.values()) if rates else 0.0
    for name, rate in rates.items():
        if rate < min_share * median:
            unfit[name].append(f"{what}: {rate:,.3g} {unit}, the median is {median:,.3g}")


def _values(processes: Sequence[Rows], key: str) -> list[float]:
    return [float(row[key]) for rows in processes for row in rows if key in row]


def _best_of_each(processes: Sequence[Rows]) -> list[float]:
    """Return the fastest exchange of each process of a node: one slow network card makes the node slow."""
    return [max(rates) for rows in processes if (rates := _values([rows], "rate"))]


def _first_broken(results: Results, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (node, partner) of failed exchanges in the first round with a failure; later ones are consequences."""
    broken = [
        (row["round"], name, names[row["partner"]])
        for name, processes in results.items()
        for rows in processes
        for row in _unfinished(rows)
    ]
    first = min((number for number, _, _ in broken), default=None)
    return sorted({(name, partner) for number, name, partner in broken if number == first})


def _unfinished(rows: Rows) -> list[Mapping[str, Any]]:
    """Return the rounds that a process started without reporting a rate."""
    done = {row["round"] for row in rows if "rate" in row}
    return [row for row in rows if "round" in row and row["round"] not in done]
