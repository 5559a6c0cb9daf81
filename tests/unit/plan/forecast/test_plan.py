import html
import json
import re
from functools import cache

import pytest

from posttrain.plan.forecast.plan import NOT_MODELLED, build_plan
from posttrain.plan.forecast.plan_figures import GROUPS, flag_groups, joined, stage_groups
from posttrain.plan.forecast.plan_page import render_plan
from posttrain.plan.forecast.plan_table import print_plan
from posttrain.plan.sizing.engine import POOL_BOUND
from posttrain.plan.sizing.phases import PHASES


@pytest.fixture(scope="module")
def plan_of(resolved):
    """Return plan_of(model, **more of the workflow's configuration); each is made once, and no test changes it."""

    @cache
    def build(model, **more):
        return build_plan(resolved(model, **more))

    return build


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_the_stable_keys_are_there_and_it_is_json(plan_of, model):
    plan = json.loads(json.dumps(plan_of(model), allow_nan=False))
    assert plan["model"]["num_parameters"] > plan["model"]["num_active_parameters"] > 0
    assert plan["parallelism"]["tensor_model_parallel_size"] >= 1
    stages = plan["parallelism"]["pipeline_model_parallel_size"]
    assert len(plan["trainer"]["memory_gib_by_stage"]) == stages
    assert plan["trainer"]["host_memory_gib_per_node"] >= 0
    assert plan["engine"]["weights_gib_per_gpu"] > 0
    assert "kv_tokens" in plan["engine"]
    assert plan["storage"]["shared_bytes"] > plan["storage"]["node_local_bytes"] > 0
    assert plan["durations_seconds"]["stage_to_node_local"] > 0
    assert all({"nodes", "gpus", "command"} <= set(rule) for rule in plan["rules"])
    assert plan["flags"]["trainer.keep_checkpoints"]["value"] == 2
    assert plan["problems"] == []
    assert plan["not_trainable"] == []
    assert plan["nodes_without_site"] == (plan["parallelism"]["nodes"] if model == "glm5" else 0)
    assert plan["not_modelled"] == list(NOT_MODELLED)


def test_flags_tell_value_and_origin(plan_of):
    flags = plan_of("tiny", set="optimizer.lr=3e-4")["flags"]
    assert flags["optimizer.lr"] == {"value": 3e-4, "origin": "set="}
    assert flags["optimizer.beta2"] == {"value": 0.98, "origin": "config/base.yaml"}
    assert flags["engine.port"] == {"value": 0, "origin": "schema default"}


def test_the_ratios_are_shown_where_engines_run_ahead(resolved, capsys):
    ahead = resolved("tiny", set="rollout.max_staleness=1 algorithm.preset=tis")
    for shown, run in ((True, ahead), (False, resolved("tiny"))):
        plan = build_plan(run)
        print_plan(plan)
        printed, page = " ".join(capsys.readouterr().out.split()), html.unescape(render_plan(plan, run))
        for ratio in ("trainer now / trainer before the step", "trainer before the step / sampler, per token"):
            assert (ratio in printed) == (ratio in page) == shown


def test_commands_run_one_rule_of_this_configuration(plan_of):
    plan = plan_of("glm5", set="optimizer.lr=3e-4 rollout.fp8=true")
    train = next(rule for rule in plan["rules"] if rule["name"] == "train")
    assert (train["nodes"], train["gpus"]) == (16, 128)
    chosen = "model=glm5 site=local 'set=optimizer.lr=3e-4 rollout.fp8=true'"
    assert train["command"] == f"snakemake --cores all --until train --config {chosen}"
    # Both evaluations are one rule of the workflow: their files tell them apart.
    commands = {rule["name"]: rule["command"] for rule in plan["rules"]}
    for when in ("before", "after"):
        file = f"results/{plan['run']}/evaluation/{when}.json"
        assert commands[f"evaluate {when}"] == f"snakemake --cores all {file} --config {chosen}"


def test_a_layout_that_does_not_fit_is_a_problem_with_its_numbers(plan_of, resolved, capsys):
    too_large = "parallel.expert_model_parallel_size=8 engine.gpus_per_engine=2"
    plan = plan_of("glm5", set=too_large)
    print_plan(plan)
    assert "does not fit" in capsys.readouterr().out
    assert "does not fit" in render_plan(plan, resolved("glm5", set=too_large))
    keys = [problem["key"] for problem in plan["problems"]]
    assert keys == ["parallel", "engine.gpus_per_engine"]
    assert all(set(problem) == {"code", "key", "value", "allowed", "remedy"} for problem in plan["problems"])
    assert "140.4 GiB" in plan["problems"][0]["allowed"]


def test_memory_by_phase_and_stage(plan_of):
    trainer = plan_of("glm5")["trainer"]
    rows = {(row["phase"], row["stage"]): row for row in trainer["phases"]}
    assert set(rows) == {(phase, stage) for phase in (*PHASES, "asleep") for stage in range(4)}
    assert all(row["gpu_gib"] == pytest.approx(sum(row["gpu"].values()), abs=1e-3) for row in rows.values())
    assert [rows["train", stage]["fits"] for stage in range(4)] == [True] * 4
    assert rows["train", 1]["gpu_gib"] > trainer["memory_gib_by_stage"][1]
    of_node = trainer["host_memory_gib_per_node_by_phase"]
    assert trainer["host_memory_gib_per_node"] == max(of_node.values()) == of_node["asleep"]
    assert of_node["save"] == pytest.approx(8 * max(rows["save", stage]["host_gib"] for stage in range(4)), rel=1e-4)


def test_layouts_of_the_plan(plan_of):
    layouts = plan_of("glm5")["layouts"]
    assert layouts["configured"]["layers_per_stage"] == [20, 20, 20, 18]
    assert layouts["configured"].keys() == layouts["proposed"][0].keys()
    assert layouts["configured"]["relative_seconds"] > layouts["proposed"][0]["relative_seconds"]
    assert layouts["num_valid"] > layouts["num_fitting"] > 0
    assert all("free in" in row["reasons"] or "too much in" in row["reasons"] for row in layouts["proposed"])


def test_the_chosen_layout_is_the_first_of_the_table(plan_of, capsys):
    print_plan(plan_of("glm5"))
    rows = [re.split(r"\s*│\s*", line.strip()) for line in capsys.readouterr().out.splitlines() if "│" in line]
    (first, *others) = [row for row in rows if len(row) == 10 and row[0].isdecimal()]
    assert (first[:6], first[9].split(";")[0]) == (["4", "4", "18", "4", "32", "1"], "chosen")
    assert len(others) == 4
    assert first[:7] not in [other[:7] for other in others]


def test_a_layout_that_does_not_fit_gets_one_that_does(plan_of):
    first, *_ = plan_of("glm5", set="parallel.expert_model_parallel_size=8")["problems"]
    assert first["key"] == "parallel"
    best = plan_of("glm5")["layouts"]["proposed"][0]
    assert f"parallel.expert_model_parallel_size={best['expert_model_parallel_size']}" in first["remedy"]


def test_a_pool_that_leaves_no_room_for_the_engines_own_work_is_a_problem(plan_of):
    """The cache sleeps while weights arrive: only the rollout limits it."""
    (problem,) = plan_of("glm5", set="engine.mem_fraction_static=0.97")["problems"]
    assert problem["key"] == "engine.mem_fraction_static"
    assert "in rollout" in problem["value"]
    lower = float(problem["remedy"].split()[0])
    assert plan_of("glm5", set=f"engine.mem_fraction_static={lower}")["problems"] == []


def test_bars_add_up_and_stand_against_the_capacity(plan_of):
    trainer = plan_of("glm5")["trainer"]
    groups = stage_groups(trainer)
    assert [(group.name, group.is_fullest) for group in groups] == [
        ("stage 0", False),
        ("stages 1-2", True),
        ("stage 3", False),
    ]
    needs = {(row["stage"], row["phase"]): row["gpu_gib"] for row in trainer["phases"]}
    for group, stages in zip(groups, ([0], [1, 2], [3]), strict=True):
        for bar in group.bars:
            assert bar.gib == max(needs[stage, bar.phase] for stage in stages)
            # The longest bar there can be is the capacity, 140.4 GiB.
            percent = sum(segment.percent for segment in bar.segments)
            assert percent == pytest.approx(100 * bar.gib / 140.4, abs=0.01)
            assert bar.fits
    assert {part for _, _, parts in GROUPS for part in parts} >= {p for row in trainer["phases"] for p in row["gpu"]}


def test_a_bar_that_does_not_fit_is_the_longest(plan_of):
    groups = stage_groups(plan_of("glm5", set="parallel.expert_model_parallel_size=8")["trainer"])
    bars = [bar for group in groups for bar in group.bars]
    longest = max(bars, key=lambda bar: bar.gib)
    assert sum(segment.percent for segment in longest.segments) == pytest.approx(100, abs=0.01)
    assert [bar.fits for bar in bars] == [bar.gib <= 140.4 for bar in bars]
    assert not longest.fits


def test_neighbours_are_told_together():
    assert [joined("stage", [4]), joined("node", [3, 4, 5])] == ["stage 4", "nodes 3-5"]


def test_gpu_hours_and_their_price(plan_of, resolved):
    plan = plan_of("glm5_4layer")
    seconds = plan["durations_seconds"]
    gpu_seconds = 8 * (seconds["train"] + seconds["evaluate before"] + seconds["evaluate after"])
    assert plan["gpu_hours"] == pytest.approx(gpu_seconds / 3600, abs=0.01)
    plan = plan_of("glm5", set="evaluation.precision=source")
    seconds = plan["durations_seconds"]  # evaluations take two nodes of their own
    gpu_seconds = 128 * seconds["train"] + 16 * (seconds["evaluate before"] + seconds["evaluate after"])
    assert plan["gpu_hours"] == pytest.approx(gpu_seconds / 3600, abs=0.01)
    assert (plan["cost"], plan["currency"]) == (None, "")
    priced = {"set": "site.price_per_gpu_hour=2.5 site.currency=EUR"}
    plan = plan_of("glm5", **priced)
    assert plan["cost"] == pytest.approx(2.5 * plan["gpu_hours"], abs=0.02)
    page = render_plan(plan, resolved("glm5", **priced))
    assert f"{plan['cost']:,.0f} EUR at 2.50 EUR each" in page
    assert plan_of("tiny")["gpu_hours"] is None


def test_copies_of_everything_are_never_less_than_slices(plan_of):
    """The local site names two nodes: only these get copies, whatever is copied."""
    for more, count in (({}, 2), ({"set": "site.node_names=[]"}, 16)):
        nothing, slices, everything = plan_of("glm5", **more)["storage"]["node_copies"]
        assert {copy["num_nodes"] for copy in (nothing, slices, everything)} == {count}
        assert nothing["all_nodes_bytes"] == 0
        assert everything["all_nodes_bytes"] == count * everything["node_bytes"]
        assert 0 < slices["all_nodes_bytes"] <= everything["all_nodes_bytes"]


def test_the_title_says_what_is_planned_on_what(plan_of, resolved):
    for model, more, title in (("glm5", {"nodes": 32}, "GLM-5 on 32 × 8 H200"), ("tiny", {}, "tiny on 1 × 1 CPU")):
        page = render_plan(plan_of(model, **more), resolved(model, **more))
        assert f"<title>plan · {title}</title>" in page
        assert f"<h1>{title}</h1>" in page


def test_more_engines_than_gpus_is_a_problem(plan_of):
    (problem,) = plan_of("glm5", set="engine.num_engines=3 engine.pd.num_prefill_engines=0")["problems"]
    assert (problem["key"], problem["value"]) == ("engine.num_engines", "192 GPUs in 3 engines")


def test_page_and_table_show_what_evaluations_take(plan_of, resolved, capsys):
    """Experts of 84.4 GiB, by hand, and what is cut with attention; nothing of engines that others have."""
    asked = {"site": "example_slurm", "set": "evaluation.precision=source"}
    plan = plan_of("glm5", **asked)
    served = plan["evaluation"]
    assert [served[key] for key in ("nodes", "num_engines", "gpus_per_engine", "precision")] == [2, 1, 16, "source"]
    assert 84.4 < served["weights_gib_per_gpu"] < served["limit_gib_per_gpu"]
    assert plan["durations_seconds"]["evaluate before"] > 0
    print_plan(plan)
    assert "2 nodes, 1 x 16 GPUs in the source's precision" in re.sub(r"\s+", " ", capsys.readouterr().out)
    page = html.unescape(render_plan(plan, resolved("glm5", **asked)))
    assert "2 nodes of their own job, 1 × 16 GPUs in the source's precision" in page
    others = plan_of("glm5", set="evaluation.precision=source evaluation.addresses=[gpu7:30000]")
    assert others["evaluation"] is None
    assert "evaluate before" not in others["durations_seconds"]


def test_page_and_table_show_the_numbers(plan_of, resolved, capsys):
    plan = plan_of("glm5")
    page = render_plan(plan, resolved("glm5"))
    print_plan(plan)
    printed = capsys.readouterr().out
    for text in (page, printed):
        assert "743,911,199,232" in text
        assert "46,661,632" in text
        assert "fits" in text
        assert "of a pipeline idle" in text
    # Layouts that were not chosen stand in a part of the page that opens on demand.
    assert "does not fit" not in re.sub(r"(?s)<details.*?</details>", "", page)
    assert all(item.split(":")[0] in page for item in NOT_MODELLED)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


UNIFIED = "engine.num_engines=2 engine.pd.num_prefill_engines=0"
SMALL_PREFILL = "engine.gpus_per_engine=8 engine.pd.gpus_per_prefill_engine=8"


def test_the_page_tells_what_its_figures_leave_out_where_they_stand(resolved):
    config = resolved("glm5")
    known, unknown = (render_plan(build_plan(config, jobs), config) for jobs in (2, None))
    assert POOL_BOUND in html.unescape(known).split("weights and KV cache")[1].split("</details>")[0]
    assert "Of a rule's jobs 2 at a time run side by side" in html.unescape(known)
    assert "All jobs of a rule are assumed to run side by side" in unknown


def test_both_kinds_of_engines_are_shown(plan_of, resolved, capsys):
    uneven = "engine.pd.gpus_per_prefill_engine=32 engine.pd.num_prefill_engines=2"
    plan = plan_of("glm5", set=uneven)
    decode, prefill = plan["engine"], plan["engine"]["prefill"]
    assert (prefill["num_engines"], prefill["gpus_per_engine"]) == (2, 32)
    assert (decode["num_engines"], decode["gpus_per_engine"]) == (1, 64)
    # half the GPUs hold twice the experts each, and less cache
    assert prefill["weights_gib_per_gpu"] > decode["weights_gib_per_gpu"]
    assert prefill["kv_tokens_per_gpu"] < decode["kv_tokens_per_gpu"]
    page = render_plan(plan, resolved("glm5", set=uneven))
    print_plan(plan)
    printed = capsys.readouterr().out
    assert "2 × 32 GPUs prefill, 1 × 64 GPUs decode" in page
    assert "2 x 32 GPUs prefill, 1 x 64 GPUs decode" in printed
    for tokens in (prefill["kv_tokens"], decode["kv_tokens"]):
        assert f"{tokens:,}" in page
        assert f"{tokens:,}" in printed
    assert "64 GPUs prefill, then the others decode" in page
    assert "GPUs prefill" not in render_plan(plan_of("glm5", set=UNIFIED), resolved("glm5", set=UNIFIED))


def test_a_prefill_engine_too_small_for_the_weights_is_named(plan_of):
    (problem,) = plan_of("glm5", set="engine.pd.gpus_per_prefill_engine=2 engine.pd.num_prefill_engines=4")["problems"]
    assert problem["key"] == "engine.pd.gpus_per_prefill_engine"
    assert "GiB of weights per GPU" in problem["value"]


@pytest.mark.parametrize("more", [{"model": "tiny"}, {"model": "glm5"}, {"model": "glm5", "set": UNIFIED}])
def test_the_page_lists_every_flag_of_every_program(plan_of, resolved, more):
    plan = plan_of(**more)
    page = html.unescape(render_plan(plan, resolved(**more)))
    rendered = {key: item for key, item in plan["flags"].items() if "keys" in item}
    groups = flag_groups(plan["flags"])
    assert [f"{group['reader']} {row['name']}" for group in groups for row in group["rows"]] == list(rendered)
    for group in groups:
        section = page.partition(f"<summary>{group['reader']} <")[2].partition("</details>")[0]
        plural = "" if len(group["rows"]) == 1 else "s"
        assert f"{len(group['rows'])} flag{plural}, {group['what']}" in section
        for row in group["rows"]:
            cells = f'<td class="mono">{row["name"]}</td><td class="mono">{row["value"] or "(empty)"}</td>'
            assert f'{cells}<td><span class="badge">{row["origin"]}</span></td>' in section
            plain = re.sub("</?span[^>]*>", "", section)
            assert all(text in plain for text in (*row["keys"], row["reason"].replace("`", "")))


def test_flags_are_told_apart_by_who_reads_them(plan_of):
    groups = {group["reader"]: group["what"] for group in flag_groups(plan_of("glm5")["flags"])}
    assert groups["megatron.model"] == "MLATransformerConfig"
    assert groups["trainer.env"] == "environment of the trainer"
    assert groups["sglang.prefill"] == "command line of a prefill engine"
    assert groups["sglang.decode.env"] == "environment of a decode engine"


def test_lists_tell_runs_of_equal_items(plan_of):
    (model, *_) = flag_groups(plan_of("glm5")["flags"])
    values = {row["name"]: row["value"] for row in model["rows"]}
    assert values["moe_layer_freq"] == "3 × 0, 75 × 1"
    assert values["qk_layernorm"] == "true"


def test_phases_add_up_to_the_step(plan_of):
    plan = plan_of("glm5", set="evaluation.precision=source")
    step, seconds = plan["step"], plan["durations_seconds"]
    rows = {row["phase"]: row for row in step["phases"]}
    assert list(rows) == ["rollout", "old_logprobs", "train", "weight_sync", "save", "evaluation"]
    parts = [row["per_step"] for row in step["phases"] if row["per_step"] is not None]
    assert sum(parts) == pytest.approx(step["seconds"], abs=0.01)
    causes = step["causes"]
    assert sum(row["seconds"] for row in causes) == pytest.approx(seconds["step_train"], abs=0.01)
    assert sum(row["share"] for row in causes) == pytest.approx(1, abs=0.001)
    assert 0 < step["mfu"] < 1
    assert sum(row["share"] or 0 for row in rows.values()) == pytest.approx(1, abs=1e-3)
    assert rows["save"]["once"] == seconds["step_save"]
    assert rows["save"]["per_step"] == pytest.approx(0, abs=0.01), "it is written during a rollout"
    evaluated = {row["phase"]: row for row in plan_of("glm5_4layer")["step"]["phases"]}
    assert evaluated["evaluation"]["per_step"] is None
    assert sum(row["per_step"] for row in step["waiting"]) == pytest.approx(seconds["step_idle"], abs=0.01)
    assert "32,768" in rows["rollout"]["note"]


@pytest.mark.parametrize("nodes", [16, 32])
def test_no_phase_takes_less_than_no_time(plan_of, nodes):
    step = plan_of("glm5", nodes=nodes)["step"]
    assert all((row["per_step"] or 0) >= 0 for row in (*step["phases"], *step["waiting"]))


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        ("tiny", {}, "no step time is planned without GPUs"),
        ("glm5", {}, "an engine of 64 GPUs, with 64 that prefill for it, leaves no node for the trainer"),
        ("glm5", {"set": UNIFIED}, "an engine of 64 GPUs leaves 8 of 16 nodes, on whose GPUs"),
        ("glm5", {"set": f"{UNIFIED} engine.gpus_per_engine=128 engine.num_engines=1"}, "128 GPUs leaves no node"),
        ("tiny", {"hardware": "h200"}, "one node cannot be split"),
        ("glm5", {"set": f"{SMALL_PREFILL} trainer.optimizer_cpu_offload=true"}, None),
    ],
)
def test_a_split_or_why_there_is_none(plan_of, resolved, model, more, reason):
    plan = plan_of(model, **more)
    page = render_plan(plan, resolved(model, **more))
    if reason is None:
        assert plan["why_no_split"] is None
        assert plan["best_split"]["train_nodes"] + plan["best_split"]["rollout_nodes"] == 16
        assert f"{plan['best_split']['train_nodes']} train (" in page
        return
    assert plan["best_split"] is None
    assert reason in plan["why_no_split"]
    assert ("none, because" in page) == (plan["step"] is not None)


def test_time_on_page_and_table(plan_of, resolved, capsys):
    plan = plan_of("glm5")
    page = html.unescape(render_plan(plan, resolved("glm5")))
    print_plan(plan)
    printed = capsys.readouterr().out
    for row in (*plan["step"]["phases"], *plan["step"]["waiting"]):
        assert row["phase"] in printed
        assert row["phase"].replace("_", " ") in page
        assert row["note"] in page
    for place, row in enumerate(plan["step"]["causes"]):
        assert row["cause"] in page
        assert (row["cause"] in printed) or place > 2, "the table has the three that cost most"


def test_without_gpus_no_time_is_told(plan_of, resolved, capsys):
    plan = plan_of("tiny")
    assert plan["step"] is None
    assert f"Not modelled: {plan['why_no_step']}." in html.unescape(render_plan(plan, resolved("tiny")))
    print_plan(plan)
    assert "a step takes" not in capsys.readouterr().out
