# Which precision of the trained model to deploy.

# What the export is compared with, and where that lies.
COMPARED = {"fp8": PATHS.export_fp8}
if CFG.serving.weights == "trained":
    COMPARED[CFG.serving.format] = PATHS.serving


rule compare_precisions:
    """Answers: which precision of the trained model to deploy, by quality against speed."""
    input:
        original=receipt_of(PATHS.hf_export),
        compared=[receipt_of(folder) for folder in COMPARED.values()],
        dataset=receipt_of(PATHS.dataset),
        suites=[receipt_of(folder) for folder in SUITE_FOLDERS.values()],
    log:
        PATHS.run_log("compare_precisions"),
    threads: 2
    resources:
        **resources_of_serving(CFG),
    params:
        original=PATHS.hf_export,
        precisions=[*COMPARED],
        checkpoints=[*COMPARED.values()],
        dataset=PATHS.dataset,
        compared=PATHS.run / "evaluation" / "precisions.json",
    message:
        f"compare the trained model with {', '.join(COMPARED)}{NEEDS.message('compare_precisions')}"
    shell:
        runs(
            "compare_precisions",
            FROM_CONFIG,
            "--original {params.original:q} --original-receipt {input.original:q}",
            "--precisions {params.precisions:q} --checkpoints {params.checkpoints:q}",
            "--dataset {params.dataset:q} --output {params.compared:q}",
            where=WHERE_SERVED,
        )
