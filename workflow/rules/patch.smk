# Patches config and tokenizer for the trainer and the engines, in a copy whose weights are links.


rule patch_hf_config:
    """Checks a checkpoint against the configuration and patches config and tokenizer in a copy."""
    input:
        receipt_of(PATHS.hf),
    output:
        update(receipt_of(PATHS.hf_patched)),
    log:
        PATHS.store_log("patch_hf_config"),
    benchmark:
        PATHS.store_log("patch_hf_config").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["patch_hf_config"],
        architecture=ARCHITECTURE,
        target=CFG.model.patch.target,
        source=PATHS.hf,
        destination=PATHS.hf_patched,
    message:
        f"validate the checkpoint against the configuration; patch: {{params.target}}{NEEDS.message('patch_hf_config')}"
    shell:
        runs(
            "patch_hf_config",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input:q}",
            "--folder {params.destination:q} --receipt {output:q}",
            where=IN_IMAGE,
        )
