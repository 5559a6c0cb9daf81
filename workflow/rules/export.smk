# Exports the trained weights to Hub layout in independent parts: the origin's names, shards and precision.
from posttrain.cluster.slurm_job import resources_of_export_check
from posttrain.plan.sizing.export_check import export_check_way

# Another trainer's checkpoint has no receipt; its own metadata identifies it.
OTHER_TRAINED = CFG.export.checkpoint_folder
TRAINED = {} if OTHER_TRAINED else {"train": PATHS.train_done}
EXPORT_PARTS = parts_of(PATHS.hf_export, CFG.convert.num_parts)
TRAIN_RECEIPT = "" if OTHER_TRAINED else "--train-receipt {input.train:q}"


rule export_hf:
    """Exports one part of the trained weights to the origin's layout and precision."""
    input:
        **TRAINED,
        origin=receipt_of(PATHS.hf_patched),
    output:
        part_receipt_of(PATHS.hf_export, "{part}"),
    log:
        PATHS.run_log("export_hf", ".part{part}"),
    benchmark:
        PATHS.run_log("export_hf", ".part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["export_hf"],
        architecture=ARCHITECTURE,
        run_folder=OTHER_TRAINED or PATHS.train,
        origin=PATHS.hf_patched,
        destination=PATHS.hf_export,
        num_parts=len(EXPORT_PARTS),
    message:
        f"export part {{wildcards.part}} of {{params.num_parts}} of the trained model to Hub layout{NEEDS.message('export_hf')}"
    shell:
        runs(
            "export_hf",
            FROM_CONFIG,
            "--run-folder {params.run_folder:q}",
            TRAIN_RECEIPT,
            "--source {params.origin:q} --source-receipt {input.origin:q}",
            "--folder {params.destination:q} --part {wildcards.part} --num-parts {params.num_parts} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_export_hf:
    """Joins the exported parts: index, config, tokenizer."""
    input:
        origin=receipt_of(PATHS.hf_patched),
        parts=[part_receipt_of(PATHS.hf_export, part) for part in EXPORT_PARTS],
    output:
        receipt_of(PATHS.hf_export),
    log:
        PATHS.run_log("finalize_export_hf"),
    benchmark:
        PATHS.run_log("finalize_export_hf").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_export_hf"],
        origin=PATHS.hf_patched,
        destination=PATHS.hf_export,
    message:
        f"join the parts of the exported model: index, config, tokenizer{NEEDS.message('finalize_export_hf')}"
    shell:
        runs(
            "finalize_export_hf",
            "--source {params.origin:q} --source-receipt {input.origin:q}",
            "--part-receipts {input.parts:q} --folder {params.destination:q} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule check_export:
    """Loads the export with transformers, and compares it with the trainer's records."""
    input:
        export=receipt_of(PATHS.hf_export),
    output:
        # Deleted first; see `evaluate`.
        receipt=receipt_of(PATHS.export_check),
        result=PATHS.export_check,
    log:
        PATHS.run_log("check_export"),
    benchmark:
        PATHS.run_log("check_export").with_suffix(".benchmark.tsv")
    threads: 8
    resources:
        **resources_of_export_check(CFG),
    params:
        format_version=FORMAT_VERSIONS["check_export"],
        export=PATHS.hf_export,
        check=export_check_way(CFG),
    message:
        f"load the export with transformers ({{params.check}}) and compare it with the trainer{NEEDS.message('check_export')}"
    shell:
        runs(
            "check_export",
            FROM_CONFIG,
            "--export {params.export:q} --export-receipt {input.export:q}",
            "--check {params.check} --output {output.result:q}",
            where=ON_ONE_NODE,
        )
