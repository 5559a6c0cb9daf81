"""The simulation of an update of weights, on traffic whose seconds are known."""

from collections import defaultdict
from pathlib import Path

import pytest
from benchmarks.update_simulation import (
    BYTES,
    Digesting,
    Simulation,
    Traffic,
    Transport,
    between_gpus,
    by_layers,
    proof_seconds,
    seconds_of,
    traffic_of,
)
from benchmarks.weight_sync import kernels_of_a_part, layout_of

from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.model_size import model_weights
from posttrain_weights.transfer_plan import plan_transfer

SLOW = Transport(made=1e9, packed=1e9, sent=1e6, written=1e9)


def traffic(messages, making=0.0, writing=0.0):
    """Return traffic of (round, sender, receiver, bytes), with as many seconds for each round of each rank."""
    of = defaultdict(lambda: defaultdict(dict))
    for number, sender, receiver, size in messages:
        of[sender][number][receiver] = size
    num_rounds = 1 + max(number for number, *_ in messages)
    at_senders = {s: dict.fromkeys(rounds, making) for s, rounds in of.items()}
    at_receivers = {r: dict.fromkeys(range(num_rounds), writing) for _, _, r, _ in messages}
    return Traffic(at_senders, at_receivers, of, num_rounds)


@pytest.fixture(scope="module")
def transfers():
    config = resolve({"model": "tiny", "site": "local"}, Path("config")).config
    held, holders = layout_of(config, senders=4, stages=2, cut=2, receivers=2, engines=2)
    return plan_transfer(held, holders, 1 << 14)


@pytest.mark.parametrize(
    ("making", "writing", "seconds"),
    [
        (0, 0, 6),  # three rounds of two seconds each
        (1, 0, 7),  # the first is made before it is sent, the others meanwhile
        (5, 0, 17),  # made at 5, 10 and 15
        (0, 1, 7),  # the last is written after it has come
        (1, 3, 12),  # written from 3 to 6, 9 and 12
        (0, 9, 29),
    ],
)
def test_rounds_are_made_sent_and_written_at_a_time(making, writing, seconds):
    assert Simulation(traffic([(n, 0, 0, 2) for n in range(3)], making, writing), 1).seconds() == seconds


def test_a_third_round_waits_for_the_place_of_the_first():
    """The first is written from 2 to 12, so that the third travels from then on, and beside it another receiver's."""
    of = traffic([(n, 0, r, 1) for n in range(3) for r in range(2)])
    slow = {0: {0: 10.0, 1: 0.0, 2: 0.0}, 1: dict.fromkeys(range(3), 0.0)}
    assert Simulation(Traffic(of.making, slow, of.messages, 3), 1).seconds() == 12


@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        ([(0, 0, 0, 4), (0, 1, 0, 4)], 8),  # into one
        ([(0, 0, 0, 4), (0, 0, 1, 4)], 8),  # out of one
        ([(0, 0, 0, 4), (0, 1, 1, 4)], 4),  # side by side
        ([(0, 0, 0, 4), (2, 0, 0, 4), (1, 1, 0, 1)], 9),  # a sender that has nothing in a round goes on
    ],
)
def test_each_link_carries_one_message_after_the_other(messages, seconds):
    assert Simulation(traffic(messages), 1).seconds() == seconds


def test_a_sender_waits_until_a_round_has_arrived_everywhere():
    """Sender 0's second round could go at once, but its first is held up by sender 1 at a shared receiver."""
    messages = [(0, 1, 0, 6), (0, 0, 0, 1), (0, 0, 1, 1), (1, 0, 1, 4)]
    of = traffic(messages)
    late = {**of.making, 0: {0: 1.0, 1: 0.0}}  # behind sender 1's message
    assert Simulation(Traffic(late, of.writing, of.messages, 2), 1).seconds() == 7 + 4


def test_letters_take_as_long_as_the_busiest_link_at_least(transfers):
    sent, came = defaultdict(int), defaultdict(int)
    for transfer in transfers:
        sent[transfer.sender] += transfer.num_bytes
        came[transfer.receiver] += transfer.num_bytes
    least, most = max(*sent.values(), *came.values()) / SLOW.sent, sum(sent.values()) / SLOW.sent
    assert least <= seconds_of(transfers, SLOW) < most
    assert seconds_of(transfers, SLOW) > 2 * seconds_of(transfers, Transport(1e9, 1e9, 4e6, 1e9))


def test_a_part_is_made_once_and_packed_for_each_receiver(transfers):
    making = traffic_of(transfers, Transport(1.0, 2.0, 1.0, 4.0, part_seconds=1000.0, make_seconds=10_000.0))
    parts = {(transfer.sender, transfer.name, transfer.made): transfer for transfer in transfers}
    made = sum(transfer.made.rows * transfer.made.columns for transfer in parts.values())
    total, sent = (sum(sum(of.values()) for of in side.values()) for side in (making.making, making.writing))
    in_all = sum(transfer.num_bytes for transfer in transfers)
    assert sent == pytest.approx(in_all / 4 + 1000 * len(transfers))
    rest = total - in_all / 2 - 1000 * len(transfers) - 10_000 * len(parts)
    assert made <= rest <= 4 * made + 16 * len(parts)
    assert len(parts) < len(transfers)


def test_prime_rls_rounds_are_layers(transfers):
    rounds = {transfer.name: transfer.piece.round for transfer in by_layers(transfers)}
    assert rounds["lm_head.weight"] == rounds["model.embed_tokens.weight"] == 0
    assert rounds["model.layers.1.input_layernorm.weight"] == 2


def test_bytes_of_glm5_2_are_those_that_were_published():
    """Of 32 ranks each has a 32nd of the experts and all else, in BF16: the MTP layer is not trained."""
    config = resolve({"model": "glm5.2", "nodes": 16, "site": "local"}, Path("config")).config
    weights = model_weights(config.model.architecture)
    kept = sum(w.bf16_bytes / (32 if w.component == "routed_experts" else 1) for w in weights)
    assert kept == pytest.approx(BYTES, rel=1e-5)


def test_each_part_is_digested_once_by_who_sends_it_and_by_who_keeps_it(transfers):
    of_bytes, of_parts = (Digesting(rate, 0.0, seconds, 0.0) for rate, seconds in ((1.0, 0.0), (float("inf"), 1.0)))
    parts = {(transfer.name, transfer.made, transfer.box, transfer.dtype): transfer for transfer in transfers}
    assert 0 < len(parts) < len(transfers)
    making = [
        sum(sum(of.values()) for of in traffic_of(transfers, SLOW, digests).making.values())
        for digests in (of_bytes, of_parts, None)
    ]
    assert making[0] - making[2] == pytest.approx(sum(transfer.num_bytes for transfer in parts.values()))
    assert making[1] - making[2] == pytest.approx(len(parts))
    kept = defaultdict(int)
    for transfer in transfers:
        kept[transfer.receiver] += transfer.num_bytes
    fast = Transport(1e30, 1e30, 1e30, 1e30)
    assert max(kept.values()) < proof_seconds(transfers, fast, of_bytes) <= max(kept.values()) + making[0]
    assert proof_seconds(transfers, fast, Digesting(float("inf"), 0.0, 0.0, 0.5)) == pytest.approx(1), "on both sides"


def test_kernels_and_the_network_are_counted():
    hardware = resolve({"model": "glm5", "nodes": 16, "site": "local"}, Path("config")).config.hardware
    kernels = kernels_of_a_part()
    assert 10 < kernels < 50
    assert between_gpus(hardware, kernels).sent == pytest.approx(44e9)
