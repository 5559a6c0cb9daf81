# Weights in the format that the engines serve, made once for all nodes.


rule quantize_rollout_fp8:
    input:
        receipt_of(PATHS.hf_patched),
    output:
        part_receipt_of(PATHS.rollout_fp8, "{part}"),
    log:
        PATHS.store_log("quantize_rollout_fp8", ".part{part}"),
    benchmark:
        PATHS.store_log("quantize_rollout_fp8", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        source=PATHS.hf_patched,
        folder=PATHS.rollout_fp8,
        num_parts=len(PARTS),
    message:
        f"quantise part {{wildcards.part}} of {{params.num_parts}} to FP8 in blocks of 128 x 128{NEEDS.message('quantize_rollout_fp8')}"
    shell:
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/quantize_rollout_fp8.py --source {params.source:q} --source-receipt {input:q}"
        " --folder {params.folder:q} --part {wildcards.part} --num-parts {params.num_parts}"
        " --threads {threads} --receipt {output:q}"


rule finalize_rollout_fp8:
    input:
        source=receipt_of(PATHS.hf_patched),
        parts=[part_receipt_of(PATHS.rollout_fp8, part) for part in PARTS],
    output:
        receipt_of(PATHS.rollout_fp8),
    log:
        PATHS.store_log("finalize_rollout_fp8"),
    benchmark:
        PATHS.store_log("finalize_rollout_fp8").with_suffix(".benchmark.tsv")
    params:
        source=PATHS.hf_patched,
        folder=PATHS.rollout_fp8,
    message:
        f"join the FP8 parts: index, config and error report{NEEDS.message('finalize_rollout_fp8')}"
    shell:
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/finalize_rollout_fp8.py --source {params.source:q} --source-receipt {input.source:q}"
        " --folder {params.folder:q} --part-receipts {input.parts:q} --receipt {output:q}"


rule quantize_nvfp4:
    input:
        receipt_of(PATHS.hf_patched),
    output:
        receipt_of(PATHS.rollout_nvfp4),
    log:
        PATHS.store_log("quantize_nvfp4"),
    benchmark:
        PATHS.store_log("quantize_nvfp4").with_suffix(".benchmark.tsv")
    params:
        source=PATHS.hf_patched,
        folder=PATHS.rollout_nvfp4,
    message:
        "quantise the experts to NVFP4"
    shell:
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/quantize_nvfp4.py --source {params.source:q} --source-receipt {input:q}"
        " --folder {params.folder:q} --threads {threads} --receipt {output:q}"
