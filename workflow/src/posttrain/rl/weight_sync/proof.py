"""Proves by digests that engines hold the trainer's weights, without a gather (`posttrain_weights.digest`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from posttrain.rl.megatron_backend.plain_data import share_plain
from posttrain.rl.megatron_backend.served_values import Magnitudes, ServedValues
from posttrain.rl.megatron_backend.weights import Shard
from posttrain.rl.weight_sync.engine_layout import CODES, EngineLayout, EngineShards, listed
from posttrain_weights.digest import Digester, as_text, key_of, together
from posttrain_weights.engine_handlers import unpacked
from posttrain_weights.transfer_plan import EngineSlice

# Index of an engine slice, (some of) its values, and their offset in the tensor.
Digested = tuple[int, torch.Tensor, tuple[int, int]]
# Limit on bytes that exist at a time only to be digested.
BATCH_BYTES = 1 << 26


@dataclass(frozen=True)
class _Expected:
    """The digests that engines must report.

    Args:
        version: Weight version.
        key: Digest key, hexadecimal.
        digests: One per engine slice, [parts, 2] int64.
    """

    version: int
    key: str
    digests: torch.Tensor


class WeightProof:
    """Compares the trainer's digests with the engines'.

    Args:
        engine_shards: The engines' weight layout.
        secret: The run's secret, on rank 0; digest keys derive from it.
    """

    def __init__(self, engine_shards: EngineShards, secret: str):
        self._engine_shards, self._secret = engine_shards, secret
        self._expected: _Expected | None = None

    def begin(self, version: int) -> Digests:
        """Return the accumulator for the digests of a new weight version; collective."""
        held, is_first = self._engine_shards.held, self._engine_shards.client is not None
        key = share_plain(key_of(self._secret, str(version)).hex() if is_first else "")
        return Digests(bytes.fromhex(key), held.parts, self._engine_shards.values.shards[0].values.device)

    def check(self, version: int, sent: Digests | None = None) -> None:
        """Check that every rank of every engine holds the current weights under a version; collective.

        Args:
            version: Weight version.
            sent: Digests taken while ranks sent their own shards; None: compute them anew.

        Raises:
            RuntimeError: An engine holds other weights; names the tensors, raised on every rank.
        """
        if sent is None:
            sent = self.begin(version)
            sent.add_all(self._engine_shards.values)
        self._expected = _Expected(version, sent.key.hex(), sent.total())
        self._require(self._expected, is_served=False)

    def check_again(self) -> None:
        """Repeat the last check; does nothing before the first.

        Raises:
            RuntimeError: See `check`.
        """
        if self._expected:
            self._require(self._expected, is_served=True)

    def _require(self, expected: _Expected, is_served: bool) -> None:
        wrong = share_plain([*self._wrong(self._engine_shards.held, expected, is_served)])
        if any(wrong):
            told = "; ".join(f"engine {number}: {names}" for number, names in enumerate(wrong) if names)
            raise RuntimeError(
                f"weight version {expected.version}: engines hold other weights than the trainer has sent "
                f"({told}). Their samples would be another policy's; the run goes on from its last checkpoint when it "
                "is started again"
            )

    def _wrong(self, held: EngineLayout, expected: _Expected, is_served: bool) -> Iterator[str]:
        """Yield for each engine the tensors that differ, or that its process was replaced; on rank 0."""
        client, runner = self._engine_shards.client, self._engine_shards.runner
        if client is None:
            return
        answers = runner.run(client.ask_ranks("digest", key=expected.key))
        key, parts_of = bytes.fromhex(expected.key), held.of_ranks
        wanted = [[as_text(together(expected.digests[parts], key)) for parts in ranks] for ranks in parts_of]
        details = answers
        versions: list[str | None] = [str(expected.version)] * len(answers)
        if answers != wanted:
            details = runner.run(client.ask_ranks("digests", key=expected.key))
            versions = runner.run(client.weight_versions()) if is_served else versions
        for number, lacking in enumerate(held.without):
            if versions[number] != str(expected.version):
                yield f"it serves version {versions[number]}: it was started again, or somebody else has updated it"
                continue
            names = {
                held.parts[part].name
                for parts, answer, told, own in zip(
                    parts_of[number], answers[number], details[number], wanted[number], strict=True
                )
                if answer != own
                for part, digest in zip(parts, unpacked(told), strict=True)
                if digest != as_text(expected.digests[part])
            }
            yield ", ".join(filter(None, (listed(sorted(names)), lacking)))


class Digests:
    """Accumulates the digests of engine slices from the values that each rank holds.

    Args:
        key: The same on all ranks.
        parts: The engine slices, the same on all ranks.
        device: Device of this rank's shards.
    """

    def __init__(self, key: bytes, parts: Sequence[EngineSlice], device: torch.device):
        self.key, self._parts, self._device = key, parts, device
        rows = max((part.box.row + part.box.rows for part in parts), default=1)
        widest = max((4 * (part.box.column + part.box.columns) for part in parts), default=4)
        self._digester = Digester(key, rows, widest, device)
        self._sums = torch.zeros(len(parts), 2, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, made: Sequence[Digested]) -> None:
        """Add values that this rank holds and that no other rank adds.

        Raises:
            WrongKernelError: See `Digester.parts`.
        """
        if made:
            numbers, tensors, corners = zip(*made, strict=True)
            own = torch.tensor(numbers).to(self._device, non_blocking=True)
            self._sums.index_add_(0, own, self._digester.parts(tensors, corners))

    @torch.no_grad()
    def add_all(self, values: ServedValues) -> None:
        """Compute and add all values that this rank is responsible for; collective.

        Args:
            values: The engines' form of this rank's shards.
        """
        wanted = defaultdict(list)
        for number, part in enumerate(self._parts):
            wanted[part.name].append((number, part))
        made = _made(values, wanted, values.agreed_magnitudes())
        while batch := [*_up_to(BATCH_BYTES, made)]:
            self.add(batch)

    def total(self) -> torch.Tensor:
        """Return the digests of all slices, [parts, 2] int64, on the CPU; collective."""
        dist.all_reduce(self._sums)
        return self._sums.cpu()


def _made(
    values: ServedValues, wanted: Mapping[str, Sequence[tuple[int, EngineSlice]]], magnitudes: Magnitudes
) -> Iterator[Digested]:
    """Yield this rank's share of the engine slices: slice index, values, and their offset."""
    own = defaultdict[bool, list[Shard]](list)
    for shard in values.shards:
        if shard.is_main and shard.hf_name in wanted:
            own[wanted[shard.hf_name][0][1].dtype == CODES].append(shard)
    for as_codes, shards in own.items():
        for made in values.parts(shards, magnitudes, as_codes):
            for number, part in wanted.get(made.name, ()):
                if made.box == part.box:
                    yield number, made.values.to(getattr(torch, part.dtype)), part.box[:2]
                elif both := made.box.meets(part.box):
                    yield number, made.cut(both).values.to(getattr(torch, part.dtype)), (both.row, both.column)


def _up_to(num_bytes: int, made: Iterator[Digested]) -> Iterator[Digested]:
    """Yield items until they total `num_bytes`."""
    total = 0
    for number, values, corner in made:
        yield number, values, corner
        total += values.nbytes
        if total >= num_bytes:
            return
