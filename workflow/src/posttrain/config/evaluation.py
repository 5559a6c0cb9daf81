"""The section `evaluation` (docs/evaluation.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.deployment import Deployment
from posttrain.config.lm_eval import LmEval
from posttrain.config.serving_benchmark import ServingBenchmark
from posttrain.document import _doc


@dataclass(frozen=True)
class Suite:
    """A named set of prompts to evaluate on, never used for training."""

    kind: str = _doc("files: local files; hub: a dataset repository (as `data.kind`)", "hub", choices=("files", "hub"))
    file: str = _doc("As `data.train_file`: a file, a pattern or, with kind=files, a folder", "")
    repo_id: str = _doc("Hub dataset repository, for kind=hub", "")
    revision: str = _doc(
        "Pinned commit of the repository, 40 hex digits, quoted; with `unpinned`, plans work but nothing is downloaded",
        "",
    )
    subset: str = _doc("Subset (configuration) of the repository, with `split`", "")
    split: str = _doc("Split to evaluate on, instead of `file`, for kind=hub", "")
    prompt_key: str = _doc("As `data.prompt_key`", "prompt")
    label_key: str = _doc("As `data.label_key`", "label")
    system_prompt: str = _doc("As `data.system_prompt`", "")
    prompt_template: str = _doc("As `data.prompt_template`", "")
    unlabeled: str = _doc("As `data.unlabeled`", "refuse", choices=("refuse", "drop"))
    reward: str = _doc(
        "Grader of the responses, as `data.reward`; empty: the same, in the run's environment if it has one", ""
    )
    num_prompts: int = _doc("Number of prompts, from the first; 0: all", 0, minimum=0)
    num_samples_per_prompt: int = _doc("Responses per prompt; pass@k is reported for k up to this number", 1, minimum=1)
    temperature: float = _doc("Sampling temperature; 0 takes the likeliest token", 1.0, minimum=0)
    max_response_tokens: int = _doc("Maximum tokens of a response; 0: `rollout.max_response_tokens`", 0, minimum=0)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on held-out prompts and suites: before, during and after training."""

    num_samples_per_prompt: int = _doc("Responses per held-out prompt", 4, minimum=1)
    temperature: float = _doc("Sampling temperature; 0 takes the likeliest token", 1.0, minimum=0)
    seed: int = _doc("Seed of sampling", 1, minimum=0)
    precision: str = _doc(
        "Precision of the weights evaluated before and after training. source: as downloaded and "
        "exported; fp8: quantised as for rollouts; auto: FP8 if rollouts use it and it needs fewer "
        "nodes, else source",
        "auto",
        choices=("auto", "source", "fp8"),
    )
    addresses: list[str] = _doc(
        "host:port of running engines, used by evaluations before and after training, lm-eval and the "
        "serving benchmark instead of starting engines. They load the weights from a folder that they "
        "must be able to read; POSTTRAIN_ENGINE_SECRET is their secret",
        [],
    )
    interval: int = _doc(
        "Steps between evaluations on training's own engines, in addition to those before and after; 0: none",
        0,
        minimum=0,
    )
    max_share: float = _doc(
        "Maximum share of training's GPU-hours for evaluations between steps, by the plan; more is rejected",
        0.03,
        exclusive_minimum=0,
        maximum=1,
    )
    suites: dict[str, Suite] = field(
        default_factory=dict, metadata={"doc": "Prompts to measure on besides the held-out ones, by names of your own"}
    )
    lm_eval: LmEval = field(default_factory=LmEval, metadata={"doc": "lm-eval's suites"})
    deployment: Deployment = field(
        default_factory=Deployment, metadata={"doc": "What may be lost by quantising, and how it is measured"}
    )
    serving: ServingBenchmark = field(default_factory=ServingBenchmark, metadata={"doc": "Speed by concurrency"})
    own_digests: list[str] = _doc(
        "Digests of your own functions, and of judges' prompts, that suites name; filled in when a configuration is "
        "resolved",
        [],
    )
