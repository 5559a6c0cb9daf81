"""Whether asynchronous training pays: the plan's simulation beside what others measured, and GLM-5 on 32 nodes.

    python -m benchmarks.async_forecast

marin, 67B MoE on 32 + 8 H100: two constants of its engines, a token's time without load and its growth per request,
are fitted on the steps at staleness 0 and 1; those at 2, 3 and 4 are predicted. NeMo-RL, DeepSeek-V3 on 512 H100:
nothing is fitted here; the constants of the plan are those of `benchmarks/published_fit.py`. GLM-5: each mode with the
best split of 32 nodes, two published distributions of lengths, with and without the indexer's kernels. Engines keep
their KV cache; checkpoints are left out. Engines draft only in the row that says so, for those that run ahead cannot:
its rollouts are as much shorter as the plan lets drafts make them.

Sources:
    marin#8955      6,235, 4,360, 3,544, 3,142 and 2,942 s per 100 updates at staleness 0 to 4 (2026-09-15)
    marin#8936      32 prompts x 4 responses of an update; 1,134 tokens on average, 3.6 % at the limit of 4,096;
                    training takes 21.9 % of 866.5 s for 24 updates. That #8955 had the same batch is assumed.
    marin#9171      3.1 to 3.6 s for new weights, of which the trainer pauses for 1.6 s
    NVIDIA-NeMo/RL  docs/about/performance-summary.md, version 0.6, as `benchmarks/published.py` has it: 111 s for 512
                    samples of 697 tokens, at most 1,536, on 512 H100, engines of 32; one step off on 256 + 256: 64.1 s
                    (examples/configs/recipes/llm/performance/grpo-deepseek-v3-64n8g-async-1off.yaml)
    lengths         Qwen3-235B-A22B of the same page: 0.7 of the limit on average; and marin's, log-normal with sigma
                    0.9, which has both its mean and its share at the limit
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from benchmarks.claims import report, report_table, start
from benchmarks.published import MODELS, REFIT_SECONDS_PER_PARAMETER, machine_of

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.model_size import count_parameters, model_weights
from posttrain.plan.timing import async_steps, rollout_of_step
from posttrain.plan.timing.async_forecast import NodeSplit, splits_of
from posttrain.plan.timing.async_simulation import AsyncSteps, SharedEngines, SimulatedSteps, simulate
from posttrain.plan.timing.async_steps import EngineFleet, bound_seconds, response_lengths, simulated_steps
from posttrain.plan.timing.decoding import Decoder, DecodingGpus
from posttrain.plan.timing.fitted import FITTED
from posttrain.plan.timing.rates import MEAN_RESPONSE_SHARE, MOST_SPECULATION_GAIN
from posttrain.plan.timing.rollout_of_step import Workload, workload
from posttrain.plan.timing.step_time import logprob_seconds, train_seconds
from posttrain.plan.timing.update_time import Trainer

CONFIG_DIR = Path(__file__).parents[1] / "config"
SHARED_STORAGE = 20e9
# marin: seconds of an update at staleness 0 to 4; groups, responses of each, training, transfer.
MARIN_SECONDS = (62.35, 43.60, 35.44, 31.42, 29.42)
MARIN = AsyncSteps(32, 4, 0, train_seconds=0.219 * 866.5 / 24, sync_seconds=3.35, on_new_weights="keep")
# The median as a share of the limit, and sigma, that give both published figures of its lengths.
MARIN_MEDIAN, MARIN_SIGMA, MARIN_LIMIT = 811 / 4096, 0.9, 4096
NEMO_SYNCHRONOUS, NEMO_ONE_OFF = 111.0, 64.1
GOALS = {1: 1.25, 4: 1.6}


def main() -> None:
    """Predict all."""
    _predict_marin(num_steps=60)
    _predict_nemo()
    _forecast_glm5(num_steps=12, most_requests=1024)


def quick() -> None:
    """Run the same code with few steps."""
    _predict_marin(num_steps=4)
    _predict_nemo()
    _forecast_glm5(num_steps=2, most_requests=32)


def marin_lengths(limit: float = MARIN_LIMIT) -> Iterator[float]:
    """Yield lengths with the distribution of marin's responses, for any limit."""
    draw = random.Random(1)
    return (min(limit * MARIN_MEDIAN * draw.lognormvariate(0, MARIN_SIGMA), limit) for _ in itertools.count())


def _predict_marin(num_steps: int) -> None:
    def seconds(max_staleness: int, token: float, per_request: float) -> float:
        engines = SharedEngines(lambda running, context: token + per_request * running, lambda *_: 0.0, 10**6)
        steps = dataclasses.replace(MARIN, max_staleness=max_staleness)
        return simulate(steps, engines, marin_lengths(), num_steps).step_seconds

    beside = MARIN.train_seconds + MARIN.sync_seconds
    # A synchronous rollout is linear in both constants; the load's part of it is what staleness 1 tells.
    rollout = MARIN_SECONDS[0] - beside
    unit = [seconds(0, *constants) - beside for constants in ((1.0, 0.0), (0.0, 1.0))]

    def constants(load: float) -> tuple[float, float]:
        return (1 - load) * rollout / unit[0], load * rollout / unit[1]

    load = _solved(lambda share: seconds(1, *constants(share)), MARIN_SECONDS[1])
    rows = []
    for k, measured in enumerate(MARIN_SECONDS):
        predicted = seconds(k, *constants(load))
        off, fitted = predicted / measured - 1, k < 2
        gains = (f"{MARIN_SECONDS[0] / each:.2f}" for each in (measured, predicted))
        rows.append(
            (
                f"marin, staleness {k}",
                f"{measured:.1f}",
                f"{predicted:.1f}",
                *gains,
                "fitted" if fitted else f"{off:+.0%}",
            )
        )
        if not fitted:
            report(f"marin, staleness {k}: off by", abs(off), 0.2)
    report_table(("", "s a step", "predicted", "gain", "predicted", "off by"), rows)
    token, per_request = constants(load)
    print(f"fitted: a token takes {1e3 * token:.2f} ms and {1e6 * per_request:.0f} us more per request")


def _solved(function: Callable[[float], float], wanted: float) -> float:
    """Return where an increasing function of 0 to 1 has a value."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def _predict_nemo() -> None:
    machine = machine_of("H100", resolve({"model": "glm5", "site": "local"}, CONFIG_DIR).config.hardware)
    arch, work = MODELS["DeepSeek-V3"], Workload(512, 0.0, 1536, 697 / 1536)
    engine = DecodingGpus(arch, machine, 32, "bf16", dp_attention=False)

    def step(train_gpus: int, engine_gpus: int, max_staleness: int) -> float:
        # TP 1, PP 16, EP 16 on all numbers of GPUs: more of them are more data-parallel ranks.
        stages = (4,) * 13 + (3,) * 3
        data = train_gpus // 16
        trainer = Trainer(arch, machine, train_gpus, stages, expert=16, num_micro_batches=512 // data, fitted=FITTED)
        trains = train_seconds(trainer, work) + logprob_seconds(trainer, work)
        trains += 0.0 if max_staleness else FITTED.switch_seconds
        refit = REFIT_SECONDS_PER_PARAMETER * count_parameters(model_weights(arch))
        fleet = EngineFleet(engine, engine_gpus // 32, 512, Decoder(engine))
        steps = AsyncSteps(32, 16, max_staleness, trains, refit, on_new_weights="keep")
        print(f"{max_staleness}: training {trains:.1f} s, new weights {refit:.1f} s, {engine_gpus // 32} engines")
        return simulated_steps(fleet, work, steps).step_seconds

    synchronous, one_off = step(512, 512, 0), step(256, 256, 1)
    rows = [
        ("NeMo-RL, synchronous", NEMO_SYNCHRONOUS, f"{synchronous:.1f}", "", ""),
        (
            "NeMo-RL, one step off",
            NEMO_ONE_OFF,
            f"{one_off:.1f}",
            f"{NEMO_SYNCHRONOUS / NEMO_ONE_OFF:.2f}",
            f"{synchronous / one_off:.2f}",
        ),
    ]
    report_table(("", "s a step", "predicted", "gain", "predicted"), rows)
    report("NeMo-RL, one step off: off by", abs(one_off / NEMO_ONE_OFF - 1), 0.2)


def _forecast_glm5(num_steps: int, most_requests: int) -> None:
    rows = []
    shares = {"0.7 of the limit": MEAN_RESPONSE_SHARE, "log-normal": _mean_share()}
    with mock.patch.multiple(async_steps, NUM_STEPS=num_steps, MOST_REQUESTS=most_requests):
        for (name, share), indexer in itertools.product(shares.items(), ("auto", "torch")):
            # The plan has one mean length; this is the distribution's own.
            with mock.patch.object(rollout_of_step, "MEAN_RESPONSE_SHARE", share):
                rows += _modes(name, indexer)
    columns = ("lengths", "indexer", "mode", "train nodes", "engines", "prefill", "s a step", "bound")
    report_table(
        (*columns, "over apart", "over shared", "over drafting", "of the bound", "trainer idle", "age", "pause, s"),
        rows,
    )


def _mean_share() -> float:
    return sum(itertools.islice(marin_lengths(1.0), 100_000)) / 100_000


def _modes(name: str, indexer: str) -> list[tuple[object, ...]]:
    words = f"engine.mtp_steps=0 rollout.on_new_weights=keep trainer.indexer_kernel={indexer}"
    request = {"model": "glm5", "nodes": 32, "recipe": "production", "site": "local", "set": words}
    config = resolve(request, CONFIG_DIR).config
    shared, apart = (splits_of(config, SHARED_STORAGE, is_shared) for is_shared in (True, False))
    found = {"shared": _best(shared, 0, name), "apart": _best(apart, 0, name)}
    found["shared, drafting"] = _drafting(*found["shared"])
    for k, goal in GOALS.items():
        found[f"staleness {k}"] = _best(apart, k, name)
        step, bound = found[f"staleness {k}"][1].step_seconds, _bound(apart, k)
        synchronous = min(found[mode][1].step_seconds for mode in ("shared", "apart"))
        what = f"GLM-5, {name}, indexer {indexer}, staleness {k}"
        report(f"{what}: over the best synchronous step", synchronous / step, goal, at_least=True)
        report(f"{what}: of the bound", bound / step, 0.9, at_least=True)
    recompute = [dataclasses.replace(split, config=_recomputing(split.config)) for split in apart]
    found["staleness 1, recompute"] = _best(recompute, 1, name)
    pause = found["staleness 1, recompute"][1].pause_seconds
    report(f"GLM-5, {name}, indexer {indexer}, recompute: pause of an update, s", pause, 1.6)
    return [_row(name, indexer, mode, split, steps, found, apart) for mode, (split, steps) in found.items()]


def _drafting(split: NodeSplit, steps: SimulatedSteps) -> tuple[NodeSplit, SimulatedSteps]:
    beside = split.train_seconds + split.sync_seconds
    seconds = beside + (steps.step_seconds - beside) / MOST_SPECULATION_GAIN
    return split, dataclasses.replace(steps, step_seconds=seconds, trainer_idle=1 - beside / seconds)


def _recomputing(config: Config) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, on_new_weights="recompute"))


def _best(splits: list[NodeSplit], max_staleness: int, name: str) -> tuple[NodeSplit, SimulatedSteps]:
    def simulated(split: NodeSplit) -> SimulatedSteps:
        work = workload(split.config)
        lengths = marin_lengths(work.longest_response) if name == "log-normal" else response_lengths(work)
        steps = split.steps(max_staleness)
        return simulated_steps(split.fleet(steps), work, steps, lengths)

    return min(((split, simulated(split)) for split in splits), key=lambda item: item[1].step_seconds)


def _bound(splits: list[NodeSplit], max_staleness: int) -> float:
    both = [(split, split.steps(max_staleness)) for split in splits]
    return min(bound_seconds(split.fleet(steps), workload(split.config), steps) for split, steps in both)


def _row(
    name: str,
    indexer: str,
    mode: str,
    split: NodeSplit,
    steps: SimulatedSteps,
    found: dict[str, tuple[NodeSplit, SimulatedSteps]],
    apart: list[NodeSplit],
) -> tuple[object, ...]:
    engine, seconds = split.config.engine, steps.step_seconds
    staleness = int(mode.split()[1].rstrip(",")) if mode.startswith("staleness") else None
    bound = None if staleness is None else _bound(apart, staleness)
    over = (f"{found[before][1].step_seconds / seconds:.2f}" for before in ("apart", "shared", "shared, drafting"))
    counts = (split.train_nodes, engine.num_engines, engine.pd.num_prefill_engines, f"{seconds:.0f}")
    bounds = ("", "") if bound is None else (f"{bound:.0f}", f"{bound / seconds:.2f}")
    waits = (f"{steps.trainer_idle:.0%}", f"{abs(steps.staleness):.1f}", f"{steps.pause_seconds:.1f}")
    return name, "kernels" if indexer == "auto" else indexer, mode, *counts, bounds[0], *over, bounds[1], *waits


if __name__ == "__main__":
    start(main, quick)
