"""Proof that engines hold what the trainer has: digests of both, without a gather (`posttrain.engines.digests`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from posttrain.config.schema import Config
from posttrain.engines.client import EngineClient, HeldWeights
from posttrain.engines.digests import Digester, as_text, key_of
from posttrain.megatron_backend.plain_data import share_plain
from posttrain.megatron_backend.served_values import ServedValues

MOST_NAMES = 5


def can_prove(config: Config) -> bool:
    """Tell whether engines have digests. SGLang's stock endpoints hash what it has made of the weights."""
    return config.engine.kind == "embedded"


class WeightProof:
    """Compares the trainer's digests with the engines'; every method is collective.

    Args:
        values: What engines have for this rank's shards.
        client: The engines, on rank 0; None elsewhere.
        runner: Event loop of rank 0.
        secret: What the engines want to be shown, on rank 0; keys come from it.
    """

    def __init__(self, values: ServedValues, client: EngineClient | None, runner: asyncio.Runner, secret: str):
        self._values, self._client, self._runner, self._secret = values, client, runner, secret

    def check(self, version: int) -> None:
        """Have every engine prove that it holds the present weights under a version.

        Raises:
            RuntimeError: One holds others; names the tensors, on every rank alike.
        """
        held = self._runner.run(self._client.digests()) if self._client else []
        key = key_of(self._secret, str(version)).hex() if self._client else ""
        dtypes = {name: dtype for name, (_, dtype) in held[0].items()} if held else {}
        key, dtypes = share_plain((key, dtypes))
        expected = self.digests(bytes.fromhex(key), dtypes)
        wrong = share_plain([_difference(expected, digests) for digests in held])
        if any(wrong):
            listed = "; ".join(f"engine {number}: {names}" for number, names in enumerate(wrong) if names)
            raise RuntimeError(
                f"weight version {version}: engines hold other weights than the trainer has sent ({listed}). Their "
                "samples would be another policy's; the run goes on from its last checkpoint when it is started again"
            )

    @torch.no_grad()
    def digests(self, key: bytes, dtypes: Mapping[str, str]) -> dict[str, str]:
        """Return the digest of every tensor that the trainer holds, as an engine holds it; collective.

        Args:
            key: The same on all ranks.
            dtypes: Of the engine's tensors, by Hub name; what it does not have gets "".
        """
        values, device = self._values, self._values.shards[0].values.device
        shapes = [shape if len(shape) == 2 else (1, *shape) for shape in values.shapes.values()]
        num_rows, row_bytes = max(rows for rows, _ in shapes), 4 * max(columns for _, columns in shapes)
        digester, magnitudes = Digester(key, num_rows, row_bytes, device), values.agreed_magnitudes()
        place = {name: index for index, name in enumerate(sorted(values.shapes.keys() & dtypes.keys()))}
        sums = torch.zeros(len(place), 2, dtype=torch.int64, device=device)
        for shard in values.shards:
            if shard.is_main and shard.hf_name in place:
                held = values.of(shard, magnitudes).to(getattr(torch, dtypes[shard.hf_name]))
                sums[place[shard.hf_name]] += digester.part(held, shard.corner)
        dist.all_reduce(sums)
        found = {name: as_text(digest) for name, digest in zip(place, sums.cpu(), strict=True)}
        return dict.fromkeys(values.shapes, "") | found


def _difference(expected: Mapping[str, str], held: HeldWeights) -> str:
    """Return the names of tensors that differ, or that one side does not have."""
    found = {name: digest for name, (digest, _) in held.items()}
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
