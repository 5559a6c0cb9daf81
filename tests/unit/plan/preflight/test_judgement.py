"""Which nodes are named unfit, from what nodes report."""

from __future__ import annotations

import pytest

from posttrain.plan.preflight.judgement import (
    judge_clocks,
    judge_facts,
    judge_links,
    judge_reach,
    judge_transfers,
    summarize,
)

SHARE = 0.25


def facts(problems=(), torch="2.13.0", disk=800.0) -> dict:
    return {"problems": list(problems), "versions": {"trainer torch": torch}, "rates": {"node-local disk": disk}}


def rows(*rates: float | None, compute: float = 10.0) -> list[dict]:
    """One process's lines: (partner, rate) by round; None broke off there."""
    lines: list[dict] = [{"compute": compute}]
    for number, (partner, rate) in enumerate(rates):
        lines.append({"round": number, "partner": partner})
        if rate is None:
            return lines
        lines.append({"round": number, "partner": partner, "rate": rate})
    return [*lines, {"all_reduce": 500.0}]


def test_nothing_is_wrong_with_nodes_that_are_alike() -> None:
    assert judge_clocks({"a": 0.0, "b": -0.9}) == {}
    assert judge_facts({"a": facts(), "b": facts(disk=300.0), "c": facts(disk=900.0)}, SHARE) == {}
    assert judge_reach({"a": [], "b": []}) == {}
    assert judge_links({"a": [rows((1, 900.0))], "b": [rows((0, 880.0))]}, SHARE) == {}


def test_clocks() -> None:
    assert judge_clocks({"a": 0.0, "b": 61.0, "c": -3.0}) == {
        "b": ["its clock is 61.0 s ahead"],
        "c": ["its clock is 3.0 s behind"],
    }


def test_what_a_node_says_itself() -> None:
    assert judge_facts({"a": facts(), "b": facts(["7 GPUs, 8 are used"])}, SHARE) == {"b": ["7 GPUs, 8 are used"]}


def test_versions_other_than_most() -> None:
    found = judge_facts({"a": facts(), "b": facts(torch="2.12.0"), "c": facts()}, SHARE)
    assert found == {"b": ["trainer torch is 2.12.0, 2.13.0 elsewhere"]}
    missing = {"problems": [], "versions": {}, "rates": {}}
    found = judge_facts({"a": facts(), "b": facts(), "c": missing}, SHARE)
    assert found == {"c": ["trainer torch is not there, 2.13.0 elsewhere"]}


def test_a_slow_disk() -> None:
    found = judge_facts({"a": facts(), "b": facts(), "c": facts(disk=100.0)}, SHARE)
    assert found == {"c": ["node-local disk: 100 MB/s, the median is 800"]}
    assert judge_facts({"a": facts(), "b": facts(), "c": facts(disk=100.0)}, 0.0) == {}


@pytest.mark.parametrize(
    ("unreachable", "unfit"),
    [
        ({"a": ["c"], "b": ["c"], "c": ["a", "b"]}, ["c"]),
        ({"a": ["c"], "b": ["c"], "c": []}, ["c"]),
        ({"a": ["d"], "b": ["d"], "c": ["d"], "d": [], "e": ["d", "a"]}, ["d", "e"]),
    ],
)
def test_the_fewest_nodes_that_explain_what_cannot_be_reached(unreachable: dict, unfit: list[str]) -> None:
    assert sorted(judge_reach(unreachable)) == unfit


def test_a_slow_network_is_not_blamed_on_partners() -> None:
    results = {
        "a": [rows((3, 20.0), (2, 900.0), (1, 880.0))],
        "b": [rows((2, 900.0), (3, 21.0), (0, 880.0))],
        "c": [rows((1, 900.0), (0, 900.0), (3, 19.0))],
        "d": [rows((0, 20.0), (1, 21.0), (2, 19.0))],
    }
    assert judge_links(results, SHARE) == {"d": ["the network: 21 MB/s, the median is 900"]}


def test_one_slow_card_makes_a_node_slow() -> None:
    results = {"a": [rows((1, 900.0)), rows((1, 900.0))], "b": [rows((0, 900.0)), rows((0, 900.0), compute=1.0)]}
    assert list(judge_links(results, SHARE)) == ["b"]


def test_an_exchange_that_breaks_off_has_two_names_and_later_ones_none() -> None:
    results = {
        "a": [rows((3, None))],
        "b": [rows((2, 900.0), (3, None))],
        "c": [rows((1, 900.0), (0, None))],
        "d": [rows((0, None))],
    }
    assert judge_links(results, SHARE) == {
        "a": ["an exchange with d broke off"],
        "d": ["an exchange with a broke off"],
    }


def test_the_summary_has_the_lowest_rates() -> None:
    results = {"a": [rows((1, 900.0))], "b": [rows((0, 880.0))]}
    nodes = {"a": facts(), "b": facts(disk=300.0)}
    text = summarize(nodes, results, {})
    assert text == "node-local disk 300 MB/s, between two nodes 880 MB/s, all-reduce 500 MB/s"
    assert summarize(nodes, results, sent(90.0, 80.0)) == f"{text}, KV cache 80 MB/s"


def sent(*rates: float | None, damaged: int | None = None) -> dict[str, list[dict]]:
    """What nodes a, b, c ... have sent to the next one each; None broke off."""
    rows = [[{"rate": rate, "has_arrived": place != damaged}] if rate else [] for place, rate in enumerate(rates)]
    return dict(zip("abcdef", rows, strict=False))


def test_transfers_of_nodes_that_are_alike() -> None:
    assert judge_transfers(sent(900.0, 880.0), "nixl", SHARE) == {}
    assert judge_transfers(sent(900.0, 300.0, 1000.0), "nixl", SHARE) == {}


def test_a_node_with_slow_transfers_in_and_out_is_named_and_not_its_neighbours() -> None:
    assert judge_transfers(sent(900.0, 20.0, 10.0), "mooncake", SHARE) == {
        "c": [
            "KV cache over mooncake from b to c: 20 MB/s, the median is 900",
            "KV cache over mooncake from c to a: 10 MB/s, the median is 900",
        ]
    }
    assert judge_transfers(sent(900.0, 20.0, 10.0), "mooncake", 0.0) == {}


def test_a_node_that_neither_sends_nor_gets_is_named() -> None:
    assert judge_transfers(sent(None, 900.0, 900.0, None), "nixl", 0.0) == {
        "a": [
            "KV cache over nixl from a to b: broke off, see preflight-a.log",
            "KV cache over nixl from d to a: broke off, see preflight-d.log",
        ]
    }


def test_two_bad_nodes_are_both_named() -> None:
    assert set(judge_transfers(sent(None, 900.0, None, None, 900.0, None), "nixl", SHARE)) == {"a", "d"}


def test_bytes_that_did_not_arrive() -> None:
    assert judge_transfers(sent(900.0, 900.0, damaged=0), "nixl", SHARE) == {
        "b": ["KV cache over nixl from a to b: brought other bytes"]
    }
