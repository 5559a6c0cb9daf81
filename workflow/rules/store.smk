# The proof of where every byte came from, and what of the shared store nobody needs any more.


rule verify:
    input:
        receipt_of(PATHS.hf_export),
    log:
        PATHS.run_log("verify"),
    message:
        "prove where every byte of the run came from"
    shell:
        "POSTTRAIN_LOG={log:q} {IN_IMAGE}python -P -m posttrain verify --resolved {RESOLVED_FILE:q}"


# Before training, or without: the checkpoints that the run begins with.
rule verify_store:
    input:
        receipt_of(PATHS.dataset),
        receipt_of(PATHS.torch_dist),
        receipt_of(PATHS.rollout_weights),
    log:
        PATHS.run_log("verify_store"),
    message:
        "prove where every byte of the checkpoints came from"
    shell:
        "POSTTRAIN_LOG={log:q} {IN_IMAGE}python -P -m posttrain verify-store --resolved {RESOLVED_FILE:q}"


rule gc:
    log:
        PATHS.run_log("gc"),
    localrule: True
    message:
        "what of the store no run needs"
    shell:
        "POSTTRAIN_LOG={log:q} python -P -m posttrain gc --resolved {RESOLVED_FILE:q}"
