"""The modules whose statements decide, each with the unit tests that have to notice a change of them."""

from __future__ import annotations

UNIT = "tests/unit"
# Where a module also does what other tests hold, only these of its functions are judged.
FUNCTIONS = {
    "rl/engines/client": {
        *("generate", "update_weights", "begin_update", "send_bucket", "end_update"),
        *("update_weights_from_disk", "_close_abandoned_update"),
    },
}
ANSWERS = (
    *(f"{UNIT}/rl/reward/test_{name}.py" for name in ("mathematics", "grade", "limits")),
    f"{UNIT}/rl/reward/test_verdicts.py::test_the_table_is_graded_as_it_says",
    f"{UNIT}/rl/reward/test_pairs.py::test_graders_agree_with_the_labels",
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
# With those of every layout, of every model, and of Transformers' own models, an edit takes a minute.
SIZES = f"{UNIT}/plan/sizing/test_model_size.py"
PARAMETERS = tuple(
    f"{SIZES}::test_{name}"
    for name in (
        *("glm5_has_the_published_number_of_parameters_tensors_and_bytes", "components_of_glm5_by_hand"),
        *("published_numbers_of_parameters", "the_four_layer_model_has_the_size_of_its_repository"),
        *(
            "active_parameters",
            "every_parameter_of_a_tied_dense_model_is_active",
            "a_tied_embedding_is_one_tensor_unless_stages_part_it",
            "biases_and_norms_of_glm_4_5",
        ),
        *("layers_of_a_model_without_experts_are_all_dense", "a_model_without_indexer_and_shared_experts"),
        "every_parameter_of_a_tied_dense_model_is_active",
        "bytes_in_nvfp4_are_those_that_the_quantiser_writes[tiny]",
        *(f"bytes_equal_those_of_the_checkpoint_tables[{model}]" for model in ("tiny", "moonlight", "qwen3_0.6b")),
    )
)
LAYOUTS = tuple(
    f"{UNIT}/plan/sizing/test_layout.py::test_{name}"
    for name in (
        *("no_small_layout_is_missed", "order_fits_first_then_the_shorter_update", "a_small_model_stays_whole"),
        *("the_published_recipe_is_among_the_first_that_fit", "idle_share_of_a_pipeline"),
        *("interleaved_stages_idle_for_less_and_send_more", "stages_are_cut_as_evenly_as_they_can_be"),
        *("bytes_sent_in_an_update_of_the_recipe_by_hand", "rates_are_shares_of_the_hardwares_own"),
        *("the_best_layout_may_have_little_room_or_there_is_none", "the_last_stage_may_have_a_single_layer"),
    )
)
SHARDED = tuple(
    f"{UNIT}/rl/weight_sync/test_transfer_faults.py::test_{name}"
    for name in (
        *("changes_bring_what_all_of_it_would_bring", "after_a_fault_or_a_new_engine_everything_comes"),
        *("weights_that_are_not_finite_get_no_version", "members_that_end_leave_no_version[2]"),
        "each_shard_is_made_once_in_an_update_and_digested_on_the_way",
    )
)
REHEARSED_PEAKS = "tests/posttrain_rehearsal/test_activations_cuda.py"
TARGETS: dict[str, tuple[str, ...]] = {
    # What is learned.
    "rl/algorithm/policy_gradient": tuple(f"{UNIT}/rl/algorithm/test_{name}.py" for name in ("advantage", "equations")),
    "rl/algorithm/objective": (f"{UNIT}/rl/algorithm/test_equations.py",),
    "rl/algorithm/aggregation/__init__": (f"{UNIT}/rl/algorithm/test_equations.py",),
    **{
        f"rl/algorithm/{part}": (f"{UNIT}/rl/algorithm/test_equations.py",)
        for part in (
            *("advantage/rloo", "advantage/reinforce_plus_plus_baseline", "level/sequence", "level/geometric"),
            *("clip/dual", "clip/cispo", "aggregation/micro_batch_mean", "aggregation/sample_mean"),
            *("aggregation/token_mean", "aggregation/constant", "correction/truncate", "correction/mask"),
        )
    },
    "rl/algorithm/advantage/grpo": (f"{UNIT}/rl/algorithm/test_advantage.py",),
    "rl/algorithm/clip/decoupled": (f"{UNIT}/rl/algorithm/test_decoupled_clip.py",),
    "rl/algorithm/logprobs": (f"{UNIT}/rl/algorithm/test_logprobs.py",),
    "rl/batching/packing": (f"{UNIT}/rl/batching/test_packing.py",),
    "rl/batching/packed_batch": (f"{UNIT}/rl/batching/test_packed_batch.py",),
    "rl/engines/sampling_seed": (f"{UNIT}/rl/engines/test_sampling_seed.py",),
    "rl/engines/client": (f"{UNIT}/rl/engines/test_client.py",),
    "rl/engines/in_flight": (f"{UNIT}/rl/engines/test_sample.py",),
    "rl/rollout/response_text": (f"{UNIT}/rl/rollout/test_response_text.py",),
    "rl/rollout/coordinator": (f"{UNIT}/rl/rollout/test_coordinator.py",),
    "rl/rollout/offline_responses": (f"{UNIT}/rl/rollout/test_offline_responses.py",),
    "rl/rollout/rollout_store": (f"{UNIT}/rl/rollout/test_rollout_store.py",),
    "rl/rollout/broadcast": (f"{UNIT}/rl/rollout/test_broadcast.py",),
    "rl/rollout/source": (f"{UNIT}/rl/rollout/test_source.py",),
    "rl/megatron_backend/train_step": (
        f"{UNIT}/rl/megatron_backend/test_train_step.py",
        # What only several ranks show.
        f"{UNIT}/rl/megatron_backend/test_layouts.py::test_two_ranks_equal_one[data]",
        f"{UNIT}/rl/megatron_backend/test_layouts.py::test_two_ranks_equal_one[pipeline]",
    ),
    # What is asked, and what an answer is worth.
    "config/reward_sum": (f"{UNIT}/config/test_reward_sum.py",),
    "rl/data/arrow_values": (f"{UNIT}/rl/data/test_arrow_values.py",),
    "rl/data/keys": (f"{UNIT}/rl/data/test_keys.py",),
    "rl/data/label_leak": (f"{UNIT}/rl/data/test_label_leak.py",),
    "rl/data/messages": (f"{UNIT}/rl/data/test_messages.py",),
    "rl/data/raw_rows": (f"{UNIT}/rl/data/test_raw_rows.py",),
    "rl/data/rendered_prompts": (f"{UNIT}/rl/data/test_rendered_prompts.py",),
    "rl/data/tool_calls": (f"{UNIT}/rl/data/test_tool_calls.py",),
    "rl/data/unread_fields": (f"{UNIT}/rl/data/test_unread_fields.py",),
    "rl/data/mixture": (f"{UNIT}/rl/data/test_mixture.py",),
    "rl/data/overlap": (f"{UNIT}/rl/data/test_overlap.py",),
    "rl/data/prompt_lengths": (f"{UNIT}/rl/data/test_prompt_lengths.py",),
    "rl/reward/shape": (f"{UNIT}/rl/reward/test_shape.py",),
    **{f"rl/reward/{part}": ANSWERS for part in ("mathematics", "equality", "notation")},
    "rl/reward/expression": (*ANSWERS, f"{UNIT}/rl/reward/test_expression.py"),
    "rl/reward/answer": (f"{UNIT}/rl/reward/test_grade.py",),
    "rl/reward/text": (f"{UNIT}/rl/reward/test_text.py", f"{UNIT}/rl/reward/test_verdicts.py"),
    "rl/reward/graders": (
        *(f"{UNIT}/rl/reward/test_graders.py::test_{name}" for name in GRADERS),
        f"{UNIT}/rl/reward/test_worker.py::test_memory_that_another_answer_has_kept_is_not_missing",
    ),
    "rl/reward/job": (f"{UNIT}/rl/reward/test_job.py",),
    "rl/reward/own": (f"{UNIT}/rl/reward/test_own.py",),
    "rl/reward/process_state": (f"{UNIT}/rl/reward/test_process_state.py",),
    "rl/reward/address_check": (f"{UNIT}/rl/reward/test_address_check.py",),
    "rl/reward/grade": (f"{UNIT}/rl/reward/test_grade.py", f"{UNIT}/rl/reward/test_task.py"),
    "rl/reward/judge": (f"{UNIT}/rl/reward/test_judge.py", f"{UNIT}/rl/reward/test_address_check.py"),
    "rl/reward/network": (f"{UNIT}/rl/reward/test_network.py",),
    "rl/reward/service": (f"{UNIT}/rl/reward/test_network.py", f"{UNIT}/rl/reward/test_address_check.py"),
    "rl/reward/task": (f"{UNIT}/rl/reward/test_task.py",),
    "http_answers": tuple(
        f"{UNIT}/test_http_answers.py::{name}"
        for name in (
            "test_the_limits_hold_before_more_is_read",
            "test_a_refusal_says_where_it_leads_or_the_beginning_of_its_text",
        )
    ),
    "posttrain_serving/slurm_servers": ("tests/posttrain_serving/test_slurm_servers.py",),
    "rl/reward/scoring": (
        f"{UNIT}/rl/reward/test_scoring.py",
        f"{UNIT}/rl/reward/test_network.py::test_a_service_is_a_term_of_the_reward_like_any_other",
        f"{UNIT}/rl/reward/test_judge.py::test_a_judge_is_a_term_of_the_reward_like_any_other",
        f"{UNIT}/rl/reward/test_judge.py::test_a_prompt_that_changed_after_planning_is_not_asked",
    ),
    "rl/training/no_signal_monitor": (f"{UNIT}/rl/training/test_no_signal_monitor.py",),
    "config/optimizer": (f"{UNIT}/config/test_optimizer.py",),
    "config/overrides": (f"{UNIT}/config/test_overrides.py",),
    "config/strict_yaml": (f"{UNIT}/config/test_strict_yaml.py",),
    "config/suites": (f"{UNIT}/config/test_suites.py",),
    "rl/training/step_evaluation": (f"{UNIT}/rl/training/test_step_evaluation.py",),
    "rl/training/colocation": (f"{UNIT}/rl/training/test_colocation.py",),
    "rl/weight_sync/engine_layout": (f"{UNIT}/rl/weight_sync/test_engine_layout.py",),
    "posttrain_verifiers/conversation": ("tests/posttrain_verifiers/test_conversation.py",),
    "posttrain_weights/transfer_plan": ("tests/posttrain_weights/test_transfer_plan.py",),
    "rl/weight_sync/proof": (f"{UNIT}/rl/weight_sync/test_proof.py",),
    "rl/weight_sync/publish": (f"{UNIT}/rl/weight_sync/test_publish.py", SHARDED[1]),
    "rl/weight_sync/sharded": (
        f"{UNIT}/rl/weight_sync/test_sharded.py::test_a_rank_passes_on_what_comes_for_the_engine_on_its_gpu",
        *SHARDED,
    ),
    # What is planned.
    **{
        f"plan/sizing/{part}": tuple(f"{UNIT}/plan/sizing/test_{name}.py" for name in names)
        for part, names in {
            "capacity": ("hardware",),
            "engine": ("engine", "hardware"),
            "evaluation": ("evaluation",),
            "tiny_model": ("tiny_model",),
            "memory": ("memory", "memory_phases"),
            "memory_phases": ("memory_phases",),
            "routes": ("routes",),
            "storage": ("storage",),
            "untracked_memory": ("untracked_memory",),
            "node_copy": ("node_copy",),
        }.items()
    },
    "plan/sizing/activations": (
        *(f"{UNIT}/plan/sizing/test_{name}.py" for name in ("activations", "memory_phases")),
        REHEARSED_PEAKS,
    ),
    "plan/sizing/activations_cuda": (REHEARSED_PEAKS,),
    "plan/sizing/attention_cuda": (f"{UNIT}/plan/sizing/test_attention_cuda.py",),
    "plan/sizing/layout": LAYOUTS,
    "plan/sizing/layout_cost": (f"{UNIT}/plan/sizing/test_layout_cost.py", *LAYOUTS[3:5], LAYOUTS[8]),
    "plan/sizing/model_size": PARAMETERS,
    "plan/sizing/layout_choice": (f"{UNIT}/plan/sizing/test_layout_choice.py",),
    "plan/sizing/export_check": (f"{UNIT}/plan/sizing/test_export_check.py",),
    # What a launch script of others means.
    **{
        f"posttrain_import/{part}": tuple(f"tests/posttrain_import/test_{name}.py" for name in names)
        for part, names in {
            "conversions": ("conversions",),
            **dict.fromkeys(("model_names", "config_file"), ("config_file",)),
            **dict.fromkeys(("planned_flags", "row"), ("row",)),
            "expression": ("expression",),
            "launcher": ("launcher",),
            "page": ("table",),
            "script": ("script", "expression"),
            **dict.fromkeys(("engine_rows", "run_rows", "trainer_rows"), ("table", "importing")),
            "importing": ("importing",),
            **dict.fromkeys(
                [f"shell{part}" for part in ("", "_calls", "_conditions", "_flow", "_words")],
                ("shell",),
            ),
            "shell_state": ("shell_state", "shell"),
        }.items()
    },
    # What stays on disk.
    "store/placeholders": (f"{UNIT}/store/test_placeholders.py",),
    "store/receipts": tuple(f"{UNIT}/store/test_{name}.py" for name in ("receipts", "names", "claim", "building")),
    "store/lease": (
        f"{UNIT}/store/test_lease.py",
        f"{UNIT}/store/test_lease_holders.py",
        f"{UNIT}/store/test_lease_clocks.py",
    ),
    "store/durable": (f"{UNIT}/store/test_durable.py", f"{UNIT}/store/test_temporaries.py"),
    "store/garbage": (f"{UNIT}/store/test_garbage.py", f"{UNIT}/store/test_references.py"),
    "rl/training/checkpoints": (f"{UNIT}/rl/training/test_checkpoints.py",),
    "checkpoint/formats/tokenizer_files": (
        f"{UNIT}/checkpoint/formats/test_tokenizer_files.py",
        f"{UNIT}/checkpoint/formats/test_patched_copy.py::test_a_repository_with_code_buffers_and_tiktoken_starts",
        f"{UNIT}/checkpoint/formats/test_patched_copy.py::test_a_class_that_ignores_its_file_is_replaced",
        f"{UNIT}/checkpoint/formats/test_patched_copy.py::test_a_chat_template_by_key_replaces_the_checkpoints",
    ),
    "checkpoint/quantization/fp8": tuple(
        f"{UNIT}/checkpoint/quantization/test_{name}.py" for name in ("fp8", "fp8_format")
    ),
    # What is said, and what is not.
    "plan/preflight/refusals": (f"{UNIT}/plan/preflight/test_refusals.py",),
    "errors": (f"{UNIT}/test_errors.py", f"{UNIT}/test_refused_writes.py"),
    "rl/engines/secret": (f"{UNIT}/rl/engines/test_secret.py",),
    "report/report_page": (f"{UNIT}/report/test_report_page.py",),
    "report/intervals": (f"{UNIT}/report/test_intervals.py", f"{UNIT}/report/test_verdict.py"),
    "report/verdict": (f"{UNIT}/report/test_verdict.py", f"{UNIT}/report/test_suite_results.py"),
    "posttrain_serving/precision/deployment": ("tests/posttrain_serving/precision/test_deployment.py",),
    "cluster/status": (f"{UNIT}/commands/test_status.py",),
}
