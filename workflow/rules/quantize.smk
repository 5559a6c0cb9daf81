# Weights in the format that the engines serve, made once for all nodes; and, on demand, in others.
FP8_SETTINGS = json.dumps(fp8_settings(CFG))
SERVING_SETTINGS = json.dumps(serving_settings(CFG))
FP8_PARTS, SERVING_PARTS, BF16_PARTS = (
    parts_of(folder, CFG.convert.num_parts) for folder in (PATHS.rollout_fp8, PATHS.serving, PATHS.bf16)
)


rule quantize_rollout_fp8:
    """Quantises one part of the weights to FP8 for the engines."""
    input:
        receipt_of(PATHS.hf_patched),
    output:
        update(part_receipt_of(PATHS.rollout_fp8, "{part}")),
    log:
        PATHS.store_log("quantize_rollout_fp8", ".part{part}"),
    benchmark:
        PATHS.store_log("quantize_rollout_fp8", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["quantize_rollout_fp8"],
        source=PATHS.hf_patched,
        folder=PATHS.rollout_fp8,
        settings=FP8_SETTINGS,
        num_parts=len(FP8_PARTS),
    message:
        f"quantise part {{wildcards.part}} of {{params.num_parts}} to FP8, a scale per {CFG.quantize.strategy}{NEEDS.message('quantize_rollout_fp8')}"
    shell:
        runs(
            "quantize_rollout_fp8",
            "--source {params.source:q} --source-receipt {input:q}",
            "--settings {params.settings:q} --folder {params.folder:q} --part {wildcards.part} --num-parts {params.num_parts}",
            "--threads {threads} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_rollout_fp8:
    """Joins the FP8 parts."""
    input:
        source=receipt_of(PATHS.hf_patched),
        parts=[part_receipt_of(PATHS.rollout_fp8, part) for part in FP8_PARTS],
    output:
        update(receipt_of(PATHS.rollout_fp8)),
    log:
        PATHS.store_log("finalize_rollout_fp8"),
    benchmark:
        PATHS.store_log("finalize_rollout_fp8").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_rollout_fp8"],
        source=PATHS.hf_patched,
        folder=PATHS.rollout_fp8,
        settings=FP8_SETTINGS,
    message:
        f"join the FP8 parts: index and config{NEEDS.message('finalize_rollout_fp8')}"
    shell:
        runs(
            "finalize_rollout_fp8",
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--settings {params.settings:q} --folder {params.folder:q} --part-receipts {input.parts:q} --receipt {output:q}",
            where=IN_IMAGE,
        )


# Not on the way to training: both checkpoints are read once more and compared.
rule verify_rollout_weights:
    """Answers: what FP8 did to the weights."""
    input:
        source=receipt_of(PATHS.hf_patched),
        quantized=receipt_of(PATHS.rollout_fp8),
    log:
        PATHS.store_log("verify_rollout_weights"),
    threads: workflow.cores if CFG.site.launcher == "local" else 1
    params:
        source=PATHS.hf_patched,
        folder=PATHS.rollout_fp8,
        report=PATHS.rollout_report,
    message:
        "measure what FP8 did to the weights"
    shell:
        runs(
            "verify_rollout_weights",
            "--source {params.source:q}",
            "--source-receipt {input.source:q} --folder {params.folder:q} --receipt {input.quantized:q}",
            "--threads {threads} --report {params.report:q}",
            where=IN_IMAGE,
        )


rule quantize_serving:
    """Quantises one part of the weights for serving: NVFP4, MXFP8 or INT4."""
    input:
        source=receipt_of(PATHS.hf_patched),
        calibration=CFG.serving.calibration,
    output:
        update(part_receipt_of(PATHS.serving, "{part}")),
    log:
        PATHS.store_log("quantize_serving", ".part{part}"),
    benchmark:
        PATHS.store_log("quantize_serving", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["quantize_serving"],
        source=PATHS.hf_patched,
        folder=PATHS.serving,
        settings=SERVING_SETTINGS,
        num_parts=len(SERVING_PARTS),
    message:
        f"quantise part {{wildcards.part}} of {{params.num_parts}} to {CFG.serving.format}"
    shell:
        runs(
            "quantize_serving",
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--settings {params.settings:q} --folder {params.folder:q} --part {wildcards.part} --num-parts {params.num_parts}",
            "--threads {threads} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_serving:
    """Joins the parts that are quantised for serving."""
    input:
        source=receipt_of(PATHS.hf_patched),
        parts=[part_receipt_of(PATHS.serving, part) for part in SERVING_PARTS],
        calibration=CFG.serving.calibration,
    output:
        update(receipt_of(PATHS.serving)),
    log:
        PATHS.store_log("finalize_serving"),
    benchmark:
        PATHS.store_log("finalize_serving").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_serving"],
        source=PATHS.hf_patched,
        folder=PATHS.serving,
        settings=SERVING_SETTINGS,
    message:
        f"join the {CFG.serving.format} parts: index and config"
    shell:
        runs(
            "finalize_serving",
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--settings {params.settings:q} --folder {params.folder:q} --part-receipts {input.parts:q} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule cast_to_bf16:
    """Casts one part of a quantised source to BF16."""
    input:
        receipt_of(PATHS.hf),
    output:
        update(part_receipt_of(PATHS.bf16, "{part}")),
    log:
        PATHS.store_log("cast_to_bf16", ".part{part}"),
    benchmark:
        PATHS.store_log("cast_to_bf16", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["cast_to_bf16"],
        source=PATHS.hf,
        folder=PATHS.bf16,
        num_parts=len(BF16_PARTS),
    message:
        "cast part {wildcards.part} of {params.num_parts} of the quantised source to BF16"
    shell:
        runs(
            "cast_to_bf16",
            "--source {params.source:q} --source-receipt {input:q}",
            "--folder {params.folder:q} --part {wildcards.part} --num-parts {params.num_parts}",
            "--threads {threads} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_bf16:
    """Joins the BF16 parts."""
    input:
        source=receipt_of(PATHS.hf),
        parts=[part_receipt_of(PATHS.bf16, part) for part in BF16_PARTS],
    output:
        update(receipt_of(PATHS.bf16)),
    log:
        PATHS.store_log("finalize_bf16"),
    benchmark:
        PATHS.store_log("finalize_bf16").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_bf16"],
        source=PATHS.hf,
        folder=PATHS.bf16,
    message:
        "join the BF16 parts: index and config"
    shell:
        runs(
            "finalize_bf16",
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--folder {params.folder:q} --part-receipts {input.parts:q} --receipt {output:q}",
            where=IN_IMAGE,
        )
