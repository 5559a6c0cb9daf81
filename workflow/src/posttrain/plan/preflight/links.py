"""One process per GPU (on CPUs, per node) that measures links of nodes: `python -m posttrain.plan.preflight.links`.

Every node exchanges a buffer with every other, in rounds in which each node has one partner, so that a slow link is
attributed to two nodes; then an all-reduce runs over all of them. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT come from the environment. Each result is printed at once as a line of JSON on stdout, because a broken link
ends this process early.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from posttrain.cluster.rendezvous import join_ranks

# A communicator takes seconds to set up, an exchange milliseconds: after this time, it has failed.
ROUND_SECONDS = 20.0
# Maximum number of partners per node; with more nodes, each exchanges with some of the others.
MAX_ROUNDS = 31
# The best of these repeats is reported, because others may use the network at the same time.
NUM_REPEATS = 3
EXCHANGE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
MATRIX_ROWS = {"cpu": 256, "cuda": 8192}


def rounds(num_nodes: int) -> Iterator[list[int]]:
    """Yield each node's partner per round, so that every two nodes meet once; the node itself means no partner.

    Source: the circle method of round-robin tournaments.

    Example:
        4 nodes: [3, 2, 1, 0], [2, 3, 0, 1]... each pair once in three rounds.
    """
    size = num_nodes + num_nodes % 2
    circle = list(range(1, size))
    for _ in range(min(size - 1, MAX_ROUNDS)):
        order = [0, *circle]
        partner = list(range(size))
        for one, other in zip(order[: size // 2], reversed(order[size // 2 :]), strict=True):
            partner[one], partner[other] = other, one
        yield [other if other < num_nodes else node for node, other in enumerate(partner[:num_nodes])]
        circle = [circle[-1], *circle[:-1]]


def main() -> None:
    """Join the other processes, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(EXCHANGE_BYTES), required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = world_size // arguments.num_nodes
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    tell(compute=compute_rate(device))
    join_ranks(backend, timedelta(seconds=ROUND_SECONDS))
    node, place = divmod(rank, per_node)
    for number, partners in enumerate(rounds(arguments.num_nodes)):
        if partners[node] != node:
            tell(round=number, partner=partners[node])  # without a rate if the exchange fails
            tell(round=number, partner=partners[node], rate=exchange_rate(partners[node] * per_node + place, device))
    tell(all_reduce=all_reduce_rate(device))
    dist.destroy_process_group()


def tell(**result: object) -> None:
    """Print one result."""
    print(json.dumps(result), flush=True)


def compute_rate(device: torch.device) -> float:
    """Return TFLOP/s of a matrix product, the best of several repeats."""
    size = MATRIX_ROWS[device.type]
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)

    def multiply() -> None:
        product = matrix @ matrix
        if product[0, 0].item() != size:
            raise RuntimeError(f"{device} multiplies wrongly: {product[0, 0].item()} is not {size}")

    return 2 * size**3 / 1e12 / best_seconds(multiply)


def exchange_rate(peer: int, device: torch.device) -> float:
    """Return MB/s in each direction of an exchange with another rank.

    Raises:
        RuntimeError: The received bytes differ from the sent ones.
    """
    outgoing = torch.full((EXCHANGE_BYTES[device.type],), dist.get_rank() % 251, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if not bool((incoming == peer % 251).all()):
            raise RuntimeError(f"rank {peer} sends other bytes than it should")

    return outgoing.numel() / 1e6 / best_seconds(exchange)


def all_reduce_rate(device: torch.device) -> float:
    """Return MB/s of a sum over all ranks, as bytes of one rank's tensor over time.

    Raises:
        RuntimeError: The sum is wrong.
    """
    size, world_size = EXCHANGE_BYTES[device.type] // 4, dist.get_world_size()
    tensor = torch.empty(size, dtype=torch.float32, device=device)

    def reduce() -> None:
        tensor.fill_(float(dist.get_rank()))
        dist.all_reduce(tensor)
        wanted = world_size * (world_size - 1) / 2
        if not bool((tensor == wanted).all()):
            raise RuntimeError(f"the sum over all ranks is wrong, {tensor.max().item()} instead of {wanted}")

    return tensor.numel() * 4 / 1e6 / best_seconds(reduce)


def best_seconds(action: Callable[[], None]) -> float:
    """Return the shortest duration of an action; the action must synchronise with the device."""
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
