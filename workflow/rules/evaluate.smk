# Evaluates the model on held-out prompts before and after training, and measures its serving speed.
#
# No rule here depends on the run's config files: while a job's input is being made, Snakemake ignores other reasons to
# run the job (changed params), even if that input is `ancient`.

from posttrain.config.suites import evaluation_settings
from posttrain.plan.sizing.evaluation import evaluates_fp8

EVALUATED = {"before": PATHS.hf_patched, "after": PATHS.hf_export}
if evaluates_fp8(CFG):
    EVALUATED = {"before": PATHS.rollout_fp8, "after": PATHS.export_fp8}
IN_FP8 = ", in FP8" if evaluates_fp8(CFG) else ""


rule evaluate:
    """Measures the model on held-out prompts, before or after training."""
    input:
        checkpoint=lambda wildcards: receipt_of(EVALUATED[wildcards.when]),
        checked=lambda wildcards: checked_before(wildcards.when, PATHS.evaluation(wildcards.when)),
        dataset=receipt_of(PATHS.dataset),
        suites=[receipt_of(folder) for folder in SUITE_FOLDERS.values()],
        run=lambda wildcards: may_run(),
    output:
        # Snakemake deletes a killed job's outputs in this order, so the receipt goes before the result.
        receipt=receipt_of(PATHS.evaluation("{when}")),
        result=report(PATHS.evaluation("{when}"), category="Evaluation", labels={"training": "{when}"}),
    log:
        PATHS.run_log("evaluate", ".{when}"),
    benchmark:
        PATHS.run_log("evaluate", ".{when}").with_suffix(".benchmark.tsv")
    threads: 2
    resources:
        **resources_of_serving(CFG),
    params:
        format_version=FORMAT_VERSIONS["evaluate"],
        evaluation=lambda wildcards: json.dumps(evaluation_settings(CFG)),
        checkpoint=lambda wildcards: EVALUATED[wildcards.when],
        dataset=PATHS.dataset,
    message:
        f"evaluate on {CFG.data.num_heldout_prompts} held-out prompts{''.join(f', {name}' for name in CFG.evaluation.suites)}, {{wildcards.when}} training{IN_FP8}{NEEDS.message('evaluate')}"
    shell:
        runs(
            "evaluate",
            FROM_CONFIG,
            "--checkpoint {params.checkpoint:q}",
            "--checkpoint-receipt {input.checkpoint:q} --dataset {params.dataset:q} --dataset-receipt {input.dataset:q}",
            "--when {wildcards.when} --output {output.result:q}",
            where=WHERE_SERVED,
            around=beside_engines(f"{EVALUATIONS}/{{wildcards.when}}.engines"),
        )


LM_EVAL = CFG.evaluation.lm_eval


rule lm_eval:
    """Evaluates the model on tasks of lm-eval, before or after training."""
    input:
        checkpoint=receipt_of(EVALUATED[LM_EVAL.when]),
        checked=checked_before(LM_EVAL.when, PATHS.lm_eval(LM_EVAL.when)),
        run=lambda wildcards: may_run(),
    output:
        # Deleted first; see `evaluate`.
        receipt=receipt_of(PATHS.lm_eval(LM_EVAL.when)),
        result=report(PATHS.lm_eval(LM_EVAL.when), category="Evaluation", labels={"training": LM_EVAL.when}),
    log:
        PATHS.run_log("lm_eval"),
    benchmark:
        PATHS.run_log("lm_eval").with_suffix(".benchmark.tsv")
    threads: 2
    resources:
        **resources_of_serving(CFG),
    params:
        format_version=FORMAT_VERSIONS["lm_eval"],
        asked=json.dumps(dataclasses.asdict(LM_EVAL)),
        checkpoint=EVALUATED[LM_EVAL.when],
    message:
        f"ask lm-eval's tasks ({', '.join(LM_EVAL.tasks) or 'none'}), {LM_EVAL.when} training{IN_FP8}{NEEDS.message('lm_eval')}"
    shell:
        runs(
            "lm_eval",
            FROM_CONFIG,
            "--checkpoint {params.checkpoint:q} --checkpoint-receipt {input.checkpoint:q}",
            "--output {output.result:q}",
            where=WHERE_SERVED,
            around=beside_engines(f"{EVALUATIONS}/{Path(PATHS.lm_eval(LM_EVAL.when)).stem}.engines"),
        )


rule benchmark_serving:
    """Answers: the serving speed of the trained model."""
    input:
        checkpoint=receipt_of(EVALUATED["after"]),
        checked=EXPORT_CHECKED,
        dataset=receipt_of(PATHS.dataset),
    log:
        PATHS.run_log("benchmark_serving"),
    threads: 2
    resources:
        **resources_of_serving(CFG),
    params:
        checkpoint=EVALUATED["after"],
        dataset=PATHS.dataset,
        measured=PATHS.run / "evaluation" / "serving.json",
    message:
        f"measure the serving speed of the trained model at several concurrencies{NEEDS.message('benchmark_serving')}"
    shell:
        runs(
            "benchmark_serving",
            FROM_CONFIG,
            "--checkpoint {params.checkpoint:q}",
            "--checkpoint-receipt {input.checkpoint:q} --dataset {params.dataset:q} --output {params.measured:q}",
            where=WHERE_SERVED,
            around=beside_engines(f"{EVALUATIONS}/benchmark_serving.engines"),
        )
