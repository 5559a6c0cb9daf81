# Converts a Hub checkpoint to Megatron torch_dist in independent parts, without GPU or model.

TORCH_DIST_PARTS = parts_of(PATHS.torch_dist, CFG.convert.num_parts)


rule convert_hf_to_torch_dist:
    """Converts one part of a checkpoint to Megatron's torch_dist, without a GPU."""
    input:
        receipt_of(PATHS.hf_patched),
    output:
        update(part_receipt_of(PATHS.torch_dist, "{part}")),
    log:
        PATHS.store_log("convert_hf_to_torch_dist", ".part{part}"),
    benchmark:
        PATHS.store_log("convert_hf_to_torch_dist", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["convert_hf_to_torch_dist"],
        architecture=ARCHITECTURE,
        source=PATHS.hf_patched,
        folder=PATHS.torch_dist,
        num_parts=len(TORCH_DIST_PARTS),
    message:
        f"convert part {{wildcards.part}} of {{params.num_parts}} to torch_dist{NEEDS.message('convert_hf_to_torch_dist')}"
    shell:
        runs(
            "convert_hf_to_torch_dist",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input:q}",
            "--folder {params.folder:q} --part {wildcards.part}",
            "--num-parts {params.num_parts} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_torch_dist:
    """Joins the converted parts and checks that no tensor is missing."""
    input:
        source=receipt_of(PATHS.hf_patched),
        parts=[part_receipt_of(PATHS.torch_dist, part) for part in TORCH_DIST_PARTS],
    output:
        update(receipt_of(PATHS.torch_dist)),
    log:
        PATHS.store_log("finalize_torch_dist"),
    benchmark:
        PATHS.store_log("finalize_torch_dist").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_torch_dist"],
        architecture=ARCHITECTURE,
        source=PATHS.hf_patched,
        folder=PATHS.torch_dist,
    message:
        f"join the parts of the torch_dist checkpoint and check that no tensor is missing{NEEDS.message('finalize_torch_dist')}"
    shell:
        runs(
            "finalize_torch_dist",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--folder {params.folder:q} --part-receipts {input.parts:q}",
            "--receipt {output:q}",
            where=IN_IMAGE,
        )
