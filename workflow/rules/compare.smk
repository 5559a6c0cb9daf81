# Chooses the precision of the trained model to deploy: queries engines of each precision, then compares all.
from posttrain.config.deployment import ORIGINAL
from posttrain.cluster.slurm_job import resources_of_comparison, resources_of_precisions
from posttrain.plan.sizing.precisions import compared_precisions, precision_config

COMPARED = dict(zip(compared_precisions(CFG), [PATHS.hf_export, PATHS.export_fp8, PATHS.serving]))
SAID = PATHS.run / "evaluation" / "precisions"
# If the engines of any precision need several nodes, all of them start around their commands.
ARE_AROUND = any(job_needs(precision_config(CFG, name), "ask_precision").nodes > 1 for name in COMPARED)
AROUND_PRECISION = (
    (f"{ON_PODS} --num-nodes {{resources.nodes}} -- " if HAS_PODS else "")
    + f"python -m posttrain.cluster.beside_engines {FROM_CONFIG} --precision {{wildcards.precision:q}}"
    + f" --checkpoint {{params.checkpoint:q}} --folder {literal(SAID)}/{{wildcards.precision:q}}.engines -- "
)


rule ask_precision:
    """Queries engines of one precision for the comparison of precisions."""
    input:
        checkpoint=lambda wildcards: receipt_of(COMPARED[wildcards.precision]),
        checked=lambda wildcards: until_made(SAID / f"{wildcards.precision}.json", EXPORT_CHECKED),
        original=lambda wildcards: [] if wildcards.precision == ORIGINAL else [SAID / f"{ORIGINAL}.json"],
        dataset=receipt_of(PATHS.dataset),
        suites=[receipt_of(folder) for folder in SUITE_FOLDERS.values()],
        run=lambda wildcards: may_run(),
    output:
        # Deleted first; see `evaluate`.
        receipt=receipt_of(SAID / "{precision}.json"),
        said=SAID / "{precision}.json",
        likeliest=SAID / "{precision}.safetensors",
    log:
        PATHS.run_log("ask_precision", ".{precision}"),
    benchmark:
        PATHS.run_log("ask_precision", ".{precision}").with_suffix(".benchmark.tsv")
    threads: 2
    resources:
        **resources_of_precisions(CFG),
    params:
        format_version=FORMAT_VERSIONS["ask_precision"],
        evaluation=lambda wildcards: json.dumps([evaluation_settings(CFG), CFG.evaluation.deployment.num_samples]),
        # They affect speed and memory, which are compared.
        engines=[
            CFG.engine.kind,
            CFG.engine.dtype,
            CFG.engine.num_engines,
            CFG.engine.gpus_per_engine,
            CFG.hardware.name,
        ],
        checkpoint=lambda wildcards: COMPARED[wildcards.precision],
        original=lambda wildcards, input: f"--original {shlex.quote(str(input.original))}" if input.original else "",
        dataset=PATHS.dataset,
    message:
        "ask engines of the trained model as {wildcards.precision} (nodes: {resources.nodes})"
    shell:
        runs(
            "ask_precision",
            FROM_CONFIG,
            "--precision {wildcards.precision:q} --checkpoint {params.checkpoint:q}",
            "--checkpoint-receipt {input.checkpoint:q} {params.original}",
            "--dataset {params.dataset:q} --dataset-receipt {input.dataset:q} --output {output.said:q}",
            where=IN_IMAGE if ARE_AROUND else WHERE_SERVED,
            around=AROUND_PRECISION if ARE_AROUND else "",
        )


rule compare_precisions:
    """Answers: which precision of the trained model to deploy, by quality against speed."""
    input:
        original=receipt_of(PATHS.hf_export),
        compared=[receipt_of(folder) for folder in COMPARED.values()],
        said=[SAID / f"{name}.json" for name in COMPARED],
    log:
        PATHS.run_log("compare_precisions"),
    threads: 2
    resources:
        **resources_of_comparison(CFG),
    params:
        checkpoints=[*COMPARED.values()],
        compared=PATHS.run / "evaluation" / "precisions.json",
    message:
        f"compare the trained model with {', '.join([*COMPARED][1:])}{NEEDS.message('compare_precisions')}"
    shell:
        runs(
            "compare_precisions",
            FROM_CONFIG,
            "--original-receipt {input.original:q} --checkpoints {params.checkpoints:q}",
            "--said {input.said:q} --output {params.compared:q}",
            where=ON_ONE_NODE,
        )
