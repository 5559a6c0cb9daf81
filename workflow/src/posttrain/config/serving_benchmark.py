"""The section `evaluation.serving` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc

# The concurrencies of published tables.
CONCURRENCIES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class ServingBenchmark:
    """Speed by concurrency, for the rule `benchmark_serving` (docs/evaluation.md)."""

    concurrency: list[str] = _doc("Numbers of concurrent requests, one table row each", [*map(str, CONCURRENCIES)])
    prompts: str = _doc(
        "random: tokens drawn from the vocabulary; heldout: the held-out prompts, rendered as in training",
        "random",
        choices=("random", "heldout"),
    )
    input_tokens: int = _doc("Length of random prompts", 2048, minimum=1)
    output_tokens: int = _doc("Length of every response; end tokens are ignored", 512, minimum=1)
    requests_per_client: int = _doc("Requests that each client sends, one after another", 4, minimum=1)
    temperature: float = _doc("Sampling temperature; 0 takes the likeliest token", 0.0, minimum=0)
    seed: int = _doc("Seed of random prompts, of their order and of sampling", 1, minimum=0)
    beside: list[str] = _doc(
        "CSV files of other tables to show next to the results; `published`: GLM-5-FP8 with vLLM on B200", []
    )

    @property
    def concurrencies(self) -> list[int]:
        """The concurrencies as numbers."""
        return [int(number) for number in self.concurrency]
