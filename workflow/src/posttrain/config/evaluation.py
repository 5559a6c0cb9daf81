"""What a run is measured on, how and when (docs/evaluation.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.deployment import Deployment
from posttrain.config.lm_eval import LmEval
from posttrain.config.serving_benchmark import ServingBenchmark
from posttrain.document import _doc


@dataclass(frozen=True)
class Suite:
    """Prompts to measure on, under a name of their own; nothing of it is trained on."""

    kind: str = _doc(
        "files: on this machine; hub: a dataset repository (as `data.kind`)", "hub", choices=("files", "hub")
    )
    file: str = _doc("As `data.train_file`: a file, a pattern or, with kind=files, a folder", "")
    repo_id: str = _doc("Hub dataset repository, for kind=hub", "")
    revision: str = _doc(
        "Pinned commit of it, 40 hex digits, quoted; `unpinned` can be planned, but nothing is fetched", ""
    )
    subset: str = _doc("Subset (configuration) of the repository, with `split`", "")
    split: str = _doc("Split to measure on, in the place of `file`, for kind=hub", "")
    prompt_key: str = _doc("As `data.prompt_key`", "prompt")
    label_key: str = _doc("As `data.label_key`", "label")
    system_prompt: str = _doc("As `data.system_prompt`", "")
    prompt_template: str = _doc("As `data.prompt_template`", "")
    unlabeled: str = _doc("As `data.unlabeled`", "refuse", choices=("refuse", "drop"))
    reward: str = _doc("What its responses are graded by, as `data.reward`; empty: that", "")
    num_prompts: int = _doc("Prompts that are asked, from the first one on; 0: all", 0, minimum=0)
    num_samples_per_prompt: int = _doc("Responses per prompt: pass@k is told for k up to this", 1, minimum=1)
    temperature: float = _doc("Sampling temperature; 0 takes the likeliest token", 1.0, minimum=0)
    max_response_tokens: int = _doc("A response is cut here; 0: at `rollout.max_response_tokens`", 0, minimum=0)


@dataclass(frozen=True)
class Evaluation:
    """Measurement on held-out prompts and suites: before, after, and while training goes on."""

    num_samples_per_prompt: int = _doc("Responses per held-out prompt", 4, minimum=1)
    temperature: float = _doc("Sampling temperature; 0 takes the likeliest token", 1.0, minimum=0)
    seed: int = _doc("Seed of sampling", 1, minimum=0)
    precision: str = _doc(
        "Of the weights before and after training. source: as they came and are exported; fp8: quantised as for "
        "rollouts; auto: FP8 where rollouts have it and fewer nodes hold it, else the source's",
        "auto",
        choices=("auto", "source", "fp8"),
    )
    addresses: list[str] = _doc(
        "host:port of engines that somebody else has started: evaluations before and after training, lm-eval and the "
        "serving benchmark ask these and start none. They load what is measured from its folder, which they have to "
        "see; POSTTRAIN_ENGINE_SECRET is theirs",
        [],
    )
    interval: int = _doc(
        "Steps between measurements on training's own engines, beside those before and after; 0: none", 0, minimum=0
    )
    max_share: float = _doc(
        "Share of training's GPU-hours that these measurements may take by the plan; more is refused",
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
