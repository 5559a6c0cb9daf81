# An existing torch_dist checkpoint replaces the conversion after a comparison with the source.

if CFG.download.torch_dist_folder:

    ruleorder: adopt_torch_dist > finalize_torch_dist

    rule adopt_torch_dist:
        """Adopts an existing torch_dist checkpoint after comparing it with the source."""
        input:
            receipt_of(PATHS.hf_patched),
        output:
            update(receipt_of(PATHS.torch_dist)),
        log:
            PATHS.store_log("adopt_torch_dist"),
        benchmark:
            PATHS.store_log("adopt_torch_dist").with_suffix(".benchmark.tsv")
        params:
            format_version=FORMAT_VERSIONS["adopt_torch_dist"],
            architecture=ARCHITECTURE,
            source=PATHS.hf_patched,
            adopted=CFG.download.torch_dist_folder,
            folder=PATHS.torch_dist,
        message:
            f"adopt {{params.adopted}} after comparing it with the source{NEEDS.message('adopt_torch_dist')}"
        shell:
            runs(
                "adopt_torch_dist",
                FROM_CONFIG,
                "--source {params.source:q} --source-receipt {input:q}",
                "--adopted {params.adopted:q} --folder {params.folder:q}",
                "--threads {threads} --receipt {output:q}",
                where=IN_IMAGE,
            )
