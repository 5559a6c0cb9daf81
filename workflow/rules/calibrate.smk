# The largest activations of experts, for 4-bit weights: the trainer's own model reads conversations in several passes.
from posttrain.config.derived import calibrating, calibration_settings
from posttrain.cluster.slurm_job import resources_of_calibration
from posttrain.plan.sizing.calibration import describe_calibration

CALIBRATED = {"source": PATHS.hf_patched, "weights": PATHS.torch_dist, "receipt": receipt_of(PATHS.torch_dist)}
if CFG.serving.weights == "trained":
    CALIBRATED = {"source": PATHS.hf_export, "weights": PATHS.train, "receipt": PATHS.train_done}
CALIBRATING_NODES = calibrating(CFG).nodes
CALIBRATED_ON_PODS = f"{ON_PODS} --num-nodes {CALIBRATING_NODES} -- " if HAS_PODS else ""


rule calibrate:
    """Finds the largest activations of experts, in passes over conversations."""
    input:
        source=receipt_of(CALIBRATED["source"]),
        weights=CALIBRATED["receipt"],
        passes=[receipt_of(folder) for folder in PASS_FOLDERS.values()],
        allowed=lambda wildcards: may_serve(PATHS.serving.name),
    output:
        update(receipt_of(PATHS.calibration)),
    log:
        PATHS.store_log("calibrate", f".{PATHS.calibration.name}"),
    benchmark:
        PATHS.store_log("calibrate", f".{PATHS.calibration.name}").with_suffix(".benchmark.tsv")
    threads: workflow.cores if CFG.site.launcher == "local" else CFG.site.slurm.cpus_per_node
    resources:
        # A resource, as for training: a change of topology does not repeat the calibration.
        **resources_of_calibration(CFG),
    params:
        format_version=FORMAT_VERSIONS["calibrate"],
        settings=json.dumps(calibration_settings(CFG)),
        source=CALIBRATED["source"],
        weights=CALIBRATED["weights"],
        folder=PATHS.calibration,
    message:
        f"calibrate {CFG.model.name} on {describe_calibration(CFG)}{NEEDS.message('calibrate')}"
    shell:
        runs(
            "calibrate",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input.source:q}",
            "--weights {params.weights:q} --weights-receipt {input.weights:q}",
            "--folder {params.folder:q} --log-folder",
            literal(PATHS.store_log("calibrate", f".{PATHS.calibration.name}").with_suffix("")),
            "--receipt {output:q}",
            where=CALIBRATED_ON_PODS,
        )
