"""Messages between ranks: each test is two ranks at one store."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from posttrain_rehearsal import distributed
from posttrain_rehearsal.messages import HangError, Messages, from_bytes, to_bytes


def said_by_two(first, second):
    """Return what each of two ranks hears, or what it raises."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = {}

    def be(rank, call, content):
        store = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=5))
        talk = Messages(store, rank, [0, 1])
        try:
            outcomes[rank] = talk.all_said("g", [0, 1], call, f"train_step.py:{rank}", content)
        except HangError as error:
            outcomes[rank] = f"{error}"
        talk.end()

    ranks = [threading.Thread(target=be, args=(rank, *spoken)) for rank, spoken in enumerate((first, second))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return outcomes


def test_what_is_said_arrives():
    assert said_by_two(("allgather_", b"ab"), ("allgather_", b"cd")) == {0: [b"ab", b"cd"], 1: [b"ab", b"cd"]}


def test_a_rollout_is_larger_than_what_a_store_takes_at_a_time():
    rollout = b'{"tokens":"AQAAAAAAAAA="}' * (1 << 20)
    assert said_by_two(("broadcast_", rollout), ("broadcast_", b""))[1] == [rollout, b""]


@pytest.mark.parametrize(("me", "origin", "sent"), [(12, 8, "4>8"), (4, 8, "12>8"), (4, 0, "0>4"), (0, 12, "12>0")])
def test_a_stage_that_is_not_there_sends_what_its_neighbour_sends(me, origin, sent):
    """Stages of four ranks, of which the third is not rehearsed."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    talk = [Messages(host, int(rank), [0, 4, 12], of_stage=4) for rank in (sent.partition(">")[0], me)]
    talk[0].send(int(sent.partition(">")[2]), "send", "there", b"shapes")
    assert talk[1].receive(origin, "here") == b"shapes"


def test_who_gives_more_than_the_other_is_named():
    found = said_by_two(("allgather_", b"ab"), ("allgather_", b"cde"))
    assert found[0] == "rank 0 gives 2 bytes to allgather_ at train_step.py:0, rank 1 of the same group gives 3"


@pytest.mark.parametrize("tensor", [torch.tensor([[1.5, -2.0]]), torch.zeros(0, 3)])
def test_bytes_become_the_tensor_that_they_were(tensor):
    assert torch.equal(from_bytes(to_bytes(tensor), torch.empty_like(tensor)), tensor)
    assert from_bytes(b"1", tensor) is None


def test_values_that_nobody_knows_have_no_size():
    assert said_by_two(("broadcast_", b"ab"), ("broadcast_", b""))[0] == [b"ab", b""]


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(2, device="cpu"), RuntimeError, "No backend type associated with device type cpu"),
        (torch.zeros(2, 3, device="meta").T, ValueError, "Tensors must be contiguous"),
    ],
)
def test_nccl_takes_whole_tensors_of_the_device(tensor, error, words, monkeypatch):
    monkeypatch.setattr(distributed, "DEVICE", "meta")
    distributed.require_nccl_takes([torch.zeros(2, 3, device="meta")])
    with pytest.raises(error, match=words):
        distributed.require_nccl_takes([tensor])
