# The trained weights as a Hub checkpoint: same names, shards and precision as the origin.


rule export_hf:
    input:
        train=PATHS.train_done,
        origin=receipt_of(PATHS.hf_patched),
    output:
        receipt_of(PATHS.hf_export),
    log:
        PATHS.run_log("export_hf"),
    benchmark:
        PATHS.run_log("export_hf").with_suffix(".benchmark.tsv")
    params:
        architecture=ARCHITECTURE,
        run_folder=PATHS.train,
        origin=PATHS.hf_patched,
        destination=PATHS.hf_export,
    message:
        f"export the trained model to Hub layout{NEEDS.message('export_hf')}"
    shell:
        "POSTTRAIN_LOG={log:q} python {SCRIPTS}/export_hf.py --run-folder {params.run_folder:q} --train-receipt {input.train:q}"
        " --origin {params.origin:q} --origin-receipt {input.origin:q} --architecture {params.architecture:q}"
        " --destination {params.destination:q} --receipt {output:q}"
