"""The modules whose statements decide, each with the unit tests that have to notice a change of them."""

from __future__ import annotations

UNIT = "tests/unit"
# Where a module also does what other tests hold, only these of its functions are judged.
FUNCTIONS = {
    "engines/client": {
        *("generate", "update_weights", "begin_update", "send_bucket", "end_update"),
        *("update_weights_from_disk", "_close_abandoned_update"),
    },
}
ANSWERS = (
    *(f"{UNIT}/reward/test_{name}.py" for name in ("mathematics", "grade", "limits")),
    f"{UNIT}/reward/test_verdicts.py::test_the_table_is_graded_as_it_says",
    f"{UNIT}/reward/test_pairs.py::test_graders_agree_with_the_labels",
)
# Those that are quick: with the others, which wait for several deadlines, an edit takes a minute.
GRADERS = (
    *(
        "an_instant_grader_needs_no_process",
        "a_failure_says_what_happened",
        "the_answers_of_a_group_are_graded_together",
    ),
    *("a_grader_that_workers_cannot_import_is_an_error", "workers_that_are_killed_from_outside_are_replaced"),
    *("a_group_has_as_many_deadlines_as_answers", "the_deadline_is_each_answer_s_own"),
)
TARGETS: dict[str, tuple[str, ...]] = {
    # What is learned.
    "algorithm/policy_gradient": tuple(f"{UNIT}/algorithm/test_{name}.py" for name in ("advantage", "equations")),
    "algorithm/objective": (f"{UNIT}/algorithm/test_equations.py",),
    "algorithm/aggregation/__init__": (f"{UNIT}/algorithm/test_equations.py",),
    **{
        f"algorithm/{part}": (f"{UNIT}/algorithm/test_equations.py",)
        for part in (
            *("advantage/rloo", "advantage/reinforce_plus_plus_baseline", "level/sequence", "level/geometric"),
            *("clip/dual", "clip/cispo", "aggregation/micro_batch_mean", "aggregation/sample_mean"),
            *("aggregation/token_mean", "aggregation/constant", "correction/truncate", "correction/mask"),
        )
    },
    "algorithm/advantage/grpo": (f"{UNIT}/algorithm/test_advantage.py",),
    "algorithm/clip/decoupled": (f"{UNIT}/algorithm/test_decoupled_clip.py",),
    "algorithm/logprobs": (f"{UNIT}/algorithm/test_logprobs.py",),
    "batching/packing": (f"{UNIT}/batching/test_packing.py",),
    "batching/packed_batch": (f"{UNIT}/batching/test_packed_batch.py",),
    "engines/sampling_seed": (f"{UNIT}/engines/test_sampling_seed.py",),
    "engines/client": (f"{UNIT}/engines/test_client.py",),
    "rollout/coordinator": (f"{UNIT}/rollout/test_coordinator.py",),
    "rollout/given": (f"{UNIT}/rollout/test_given.py",),
    "rollout/persisted": (f"{UNIT}/rollout/test_persisted.py",),
    "rollout/sharing": (f"{UNIT}/rollout/test_sharing.py",),
    "megatron_backend/train_step": (
        f"{UNIT}/megatron_backend/test_train_step.py",
        # What only several ranks show.
        f"{UNIT}/megatron_backend/test_layouts.py::test_two_ranks_equal_one[data]",
        f"{UNIT}/megatron_backend/test_layouts.py::test_two_ranks_equal_one[pipeline]",
    ),
    # What is asked, and what an answer is worth.
    "config/reward_sum": (f"{UNIT}/config/test_reward_sum.py",),
    "data/arrow_values": (f"{UNIT}/data/test_arrow_values.py",),
    "data/keys": (f"{UNIT}/data/test_keys.py",),
    "data/label_leak": (f"{UNIT}/data/test_label_leak.py",),
    "data/messages": (f"{UNIT}/data/test_messages.py",),
    "data/raw_rows": (f"{UNIT}/data/test_raw_rows.py",),
    "data/rendered": (f"{UNIT}/data/test_rendered.py",),
    "data/tool_calls": (f"{UNIT}/data/test_tool_calls.py",),
    "data/unread_fields": (f"{UNIT}/data/test_unread_fields.py",),
    "data/mixture": (f"{UNIT}/data/test_mixture.py",),
    "data/overlap": (f"{UNIT}/data/test_overlap.py",),
    "data/prompt_lengths": (f"{UNIT}/data/test_prompt_lengths.py",),
    "reward/shape": (f"{UNIT}/reward/test_shape.py",),
    **{f"reward/{part}": ANSWERS for part in ("mathematics", "equality", "notation", "expression")},
    "reward/answer": (f"{UNIT}/reward/test_grade.py",),
    "reward/text": (f"{UNIT}/reward/test_text.py", f"{UNIT}/reward/test_verdicts.py"),
    "reward/graders": (
        *(f"{UNIT}/reward/test_graders.py::test_{name}" for name in GRADERS),
        f"{UNIT}/reward/test_worker.py::test_memory_that_another_answer_has_kept_is_not_missing",
    ),
    "reward/job": (f"{UNIT}/reward/test_job.py",),
    "reward/own": (f"{UNIT}/reward/test_own.py",),
    "reward/process_state": (f"{UNIT}/reward/test_process_state.py",),
    "reward/service": (f"{UNIT}/reward/test_network.py",),
    "http_answers": tuple(
        f"{UNIT}/test_http_answers.py::{name}"
        for name in (
            "test_the_limits_hold_before_more_is_read",
            "test_a_refusal_says_where_it_leads_or_the_beginning_of_its_text",
        )
    ),
    "launch/served": (f"{UNIT}/launch/test_served.py",),
    "reward/scoring": (f"{UNIT}/reward/test_scoring.py",),
    "training/lessons": (f"{UNIT}/training/test_lessons.py",),
    "config/overrides": (f"{UNIT}/config/test_overrides.py",),
    "config/strict_yaml": (f"{UNIT}/config/test_strict_yaml.py",),
    "config/suites": (f"{UNIT}/config/test_suites.py",),
    "training/step_evaluation": (f"{UNIT}/training/test_step_evaluation.py",),
    "training/turns": (f"{UNIT}/training/test_turns.py",),
    "weight_sync/holdings": (f"{UNIT}/weight_sync/test_holdings.py",),
    "weight_sync/letters": (f"{UNIT}/weight_sync/test_letters.py",),
    # What is planned.
    "planner/sizing/layout_choice": (f"{UNIT}/planner/sizing/test_layout_choice.py",),
    "planner/sizing/export_check": (f"{UNIT}/planner/sizing/test_export_check.py",),
    # What stays on disk.
    "artifacts/placeholders": (f"{UNIT}/artifacts/test_placeholders.py",),
    "artifacts/receipts": tuple(
        f"{UNIT}/artifacts/test_{name}.py" for name in ("receipts", "names", "claim", "building")
    ),
    "artifacts/lease": (
        f"{UNIT}/artifacts/test_lease.py",
        f"{UNIT}/artifacts/test_lease_holders.py",
        f"{UNIT}/artifacts/test_lease_clocks.py",
    ),
    "artifacts/durable": (f"{UNIT}/artifacts/test_durable.py", f"{UNIT}/artifacts/test_temporaries.py"),
    "artifacts/garbage": (f"{UNIT}/artifacts/test_garbage.py", f"{UNIT}/artifacts/test_references.py"),
    "training/checkpoints": (f"{UNIT}/training/test_checkpoints.py",),
    "checkpoint/quantization/fp8": tuple(
        f"{UNIT}/checkpoint/quantization/test_{name}.py" for name in ("fp8", "fp8_format")
    ),
    # What is said, and what is not.
    "preflight/refusals": (f"{UNIT}/preflight/test_refusals.py",),
    "errors": (f"{UNIT}/test_errors.py", f"{UNIT}/test_refused_writes.py"),
    "engines/secret": (f"{UNIT}/engines/test_secret.py",),
    "observability/report_page": (f"{UNIT}/observability/test_report_page.py",),
    "observability/intervals": (f"{UNIT}/observability/test_intervals.py", f"{UNIT}/observability/test_verdict.py"),
    "observability/verdict": (f"{UNIT}/observability/test_verdict.py", f"{UNIT}/observability/test_suite_results.py"),
    "evaluation/deployment": (f"{UNIT}/evaluation/test_deployment.py",),
    "launch/status": (f"{UNIT}/commands/test_status.py",),
}
