"""Proof that engines hold what the trainer has: digests of both, without a gather (`posttrain_plugin.digests`)."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from posttrain.config.schema import Config
from posttrain.engines.buckets import weight_of
from posttrain.engines.client import EngineClient
from posttrain.engines.in_sglang.posttrain_plugin.digests import Digester, as_text, key_of, together
from posttrain.engines.in_sglang.posttrain_plugin.followed import Box
from posttrain.engines.in_sglang.posttrain_plugin.held import unpacked
from posttrain.megatron_backend.plain_data import share_plain
from posttrain.megatron_backend.served_values import ServedValues

MOST_NAMES = 5
CODES = "float8_e4m3fn"


def can_prove(config: Config) -> bool:
    """Tell whether engines compute with what they load. SGLang makes other codes and scales of FP8 on Blackwell."""
    is_blackwell = config.hardware.device == "cuda" and float(config.hardware.compute_capability) >= 10
    return config.engine.kind == "embedded" or not (is_blackwell and config.rollout.fp8)


class HeldPart(NamedTuple):
    """A part of a tensor as a rank of an engine holds it.

    Args:
        name: Of the tensor, on the Hub.
        box: Which part.
        dtype: As torch spells it.
    """

    name: str
    box: Box
    dtype: str


@dataclass(frozen=True)
class _Holders:
    """Who holds what.

    Args:
        parts: All that differ.
        of_ranks: For each rank of each engine, which of `parts` it holds; on rank 0, empty elsewhere.
        without: Engine -> names that it lacks, or that it has no copy of.
    """

    parts: list[HeldPart]
    of_ranks: list[list[torch.Tensor]]
    without: list[str]


class WeightProof:
    """Compares the trainer's digests with the engines'; every method is collective.

    Args:
        values: What engines have for this rank's shards.
        client: The engines, on rank 0; None elsewhere.
        runner: Event loop of rank 0.
        secret: Of the run, on rank 0; keys come from it.
    """

    def __init__(self, values: ServedValues, client: EngineClient | None, runner: asyncio.Runner, secret: str):
        self._values, self._client, self._runner, self._secret = values, client, runner, secret
        self._holders: _Holders | None = None

    def check(self, version: int) -> None:
        """Have every rank of every engine prove that it holds the present weights under a version.

        Raises:
            RuntimeError: One holds others; names the tensors, on every rank alike.
        """
        self._holders = self._holders or self._find_holders()
        key = share_plain(key_of(self._secret, str(version)).hex() if self._client else "")
        expected = self.digests(bytes.fromhex(key), self._holders.parts)
        wrong = share_plain([*self._wrong(self._holders, key, expected)])
        if any(wrong):
            listed = "; ".join(f"engine {number}: {names}" for number, names in enumerate(wrong) if names)
            raise RuntimeError(
                f"weight version {version}: engines hold other weights than the trainer has sent ({listed}). Their "
                "samples would be another policy's; the run goes on from its last checkpoint when it is started again"
            )

    @torch.no_grad()
    def digests(self, key: bytes, parts: Sequence[HeldPart]) -> torch.Tensor:
        """Return the digests of parts of what the trainer holds, as an engine holds them, [parts, 2] int64; collective.

        Args:
            key: The same on all ranks.
            parts: The same on all ranks.
        """
        values, device = self._values, self._values.shards[0].values.device
        wanted: dict[str, list[tuple[int, HeldPart]]] = defaultdict(list)
        for number, part in enumerate(parts):
            wanted[part.name].append((number, part))
        rows = max((part.box.row + part.box.rows for part in parts), default=1)
        widest = max((4 * (part.box.column + part.box.columns) for part in parts), default=4)
        digester, magnitudes = Digester(key, rows, widest, device), values.agreed_magnitudes()
        sums = torch.zeros(len(parts), 2, dtype=torch.int64, device=device)
        for shard in (shard for shard in values.shards if shard.is_main and shard.hf_name in wanted):
            as_codes = wanted[shard.hf_name][0][1].dtype == CODES
            for name, box, found in values.parts(shard, magnitudes, as_codes):
                for number, part in wanted.get(name, ()):
                    if both := box.meets(part.box):
                        row, column, num_rows, columns = both.within(box)
                        piece = found[row : row + num_rows, column : column + columns]
                        held = piece.to(getattr(torch, part.dtype))
                        sums[number] += digester.part(held, (both.row, both.column))
        dist.all_reduce(sums)
        return sums.cpu()

    def _find_holders(self) -> _Holders:
        """Ask the engines what they hold; collective."""
        numbers: dict[HeldPart, int] = {}
        of_ranks, without = [], []
        for told in self._asked_for_parts() if self._client else []:
            held = [[HeldPart(name, Box(*box), dtype) for name, *box, dtype in rank["parts"]] for rank in told]
            of_ranks.append([torch.tensor([numbers.setdefault(p, len(numbers)) for p in rank]) for rank in held])
            names = {part.name: part.dtype for rank in held for part in rank}
            derived = {name for rank in told for name in rank["derived"]}
            without.append(_listed(sorted(self._expected_names(names) ^ names.keys() | derived)))
        shared = share_plain([[part.name, [*part.box], part.dtype] for part in numbers])
        return _Holders([HeldPart(name, Box(*box), dtype) for name, box, dtype in shared], of_ranks, without)

    def _asked_for_parts(self) -> list[list[dict[str, Any]]]:
        """Return what each rank of each engine tells of its parts, with their names."""
        assert self._client
        sent = [[name, list(spec.shape), spec.dtype] for name, spec in self._values.sent_specs.items()]
        engines = self._runner.run(self._client.ask_ranks("parts", tensors=sent))
        told = [[unpacked(answer) for answer in answers] for answers in engines]
        for rank in itertools.chain(*told):
            rank["parts"] = [[sent[index][0], *rest] for index, *rest in rank["parts"]]
        return told

    def _expected_names(self, dtypes: Mapping[str, str]) -> set[str]:
        """Return the names that an engine has to hold: scales only where it holds codes."""
        names = self._values.sent_specs
        of_scales = {name: code for name in names if (code := weight_of(name)) != name and code in names}
        return {name for name in names if dtypes.get(of_scales.get(name, ""), CODES) == CODES}

    def _wrong(self, holders: _Holders, key: str, expected: torch.Tensor) -> Iterator[str]:
        """Yield for each engine the names of tensors that differ; on rank 0."""
        if self._client is None:
            return
        answers = self._runner.run(self._client.ask_ranks("digest", key=key))
        differ = [
            [told != as_text(together(expected[held], bytes.fromhex(key))) for told, held in zip(*pair, strict=True)]
            for pair in zip(answers, holders.of_ranks, strict=True)
        ]
        details = self._runner.run(self._client.ask_ranks("digests", key=key)) if any(map(any, differ)) else answers
        for number, (ranks, lacking) in enumerate(zip(differ, holders.without, strict=True)):
            names = {
                holders.parts[part].name
                for rank, is_wrong in enumerate(ranks)
                if is_wrong
                for part, told in zip(
                    holders.of_ranks[number][rank].tolist(), unpacked(details[number][rank]), strict=True
                )
                if told != as_text(expected[part])
            }
            yield ", ".join(filter(None, (_listed(sorted(names)), lacking)))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
