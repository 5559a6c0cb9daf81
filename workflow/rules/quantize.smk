# Recodes weights to other number formats: the engines' format once for all nodes; others, and BF16, on demand.
from collections import UserString
from types import SimpleNamespace

from posttrain.store.weight_formats import BF16, ENGINES, EXPORT, EXPORT_SERVING, SERVING, START
from posttrain.config.derived import is_calibrated_here, needs_untrained

# Inputs of formats with activation scales: our receipt, or the user's files.
CALIBRATED_BY = {
    PATHS.serving.name: [receipt_of(PATHS.calibration)] if is_calibrated_here(CFG) else CFG.serving.calibration
}
IS_TRAINED_SERVED = CFG.serving.weights == "trained"
# Folder's name -> how it is made. Snakemake compares only params of built-in types. BF16 settings are a UserString, so
# that casts by older versions are not repeated.
QUANTIZED = {
    PATHS.rollout_fp8.name: SimpleNamespace(
        parts=parts_of(PATHS.rollout_fp8, CFG.convert.num_parts),
        steps=ENGINES,
        source=PATHS.hf_patched,
        settings=json.dumps(recoding_settings(CFG, ENGINES.step)),
        calibration=[],
        title="FP8",
        more={
            "quantize": f", a scale per {CFG.quantize.strategy}{NEEDS.message('quantize')}",
            "finalize_quantized": f"{NEEDS.message('finalize_quantized')}",
        },
    ),
    PATHS.rollout_start.name: SimpleNamespace(
        parts=parts_of(PATHS.rollout_start, 1) if needs_untrained(CFG) else [],
        steps=START,
        source=PATHS.hf_patched,
        settings=json.dumps(recoding_settings(CFG, START.step)),
        calibration=[],
        title="FP8",
        more={
            "quantize": f", of what the trainer does not send{NEEDS.message('quantize start')}",
            "finalize_quantized": f", for engines that begin empty{NEEDS.message('finalize_quantized start')}",
        },
    ),
    PATHS.export_fp8.name: SimpleNamespace(
        parts=parts_of(PATHS.export_fp8, CFG.convert.num_parts),
        steps=EXPORT,
        source=PATHS.hf_export,
        settings=json.dumps(recoding_settings(CFG, EXPORT.step)),
        calibration=[],
        title="FP8",
        more={
            "quantize": f", a scale per {CFG.quantize.strategy}, to evaluate the trained model{NEEDS.message('quantize after')}",
            "finalize_quantized": f"{NEEDS.message('finalize_quantized after')}",
        },
    ),
    PATHS.serving.name: SimpleNamespace(
        parts=parts_of(PATHS.serving, CFG.convert.num_parts),
        steps=EXPORT_SERVING if IS_TRAINED_SERVED else SERVING,
        source=PATHS.hf_export if IS_TRAINED_SERVED else PATHS.hf_patched,
        settings=json.dumps(recoding_settings(CFG, SERVING.step)),
        calibration=PATHS.calibration_files,
        title=CFG.serving.format,
        more={"quantize": "", "finalize_quantized": ""},
    ),
    PATHS.bf16.name: SimpleNamespace(
        parts=parts_of(PATHS.bf16, CFG.convert.num_parts),
        steps=BF16,
        source=PATHS.hf,
        settings=UserString(json.dumps(recoding_settings(CFG, BF16.step))),
        calibration=[],
        title="BF16",
        more={"quantize": "", "finalize_quantized": ""},
    ),
}
QUANTIZED_FOLDER = PATHS.model_root / "{quantized}"


wildcard_constraints:
    quantized="|".join(QUANTIZED),


rule quantize:
    """Recodes one part of the weights to another number format."""
    input:
        source=lambda wildcards: receipt_of(QUANTIZED[wildcards.quantized].source),
        calibration=lambda wildcards: CALIBRATED_BY.get(wildcards.quantized, []),
        allowed=lambda wildcards: may_serve(wildcards.quantized),
    output:
        update(part_receipt_of(QUANTIZED_FOLDER, "{part}")),
    log:
        PATHS.store_log("quantize", ".{quantized}.part{part}"),
    benchmark:
        PATHS.store_log("quantize", ".{quantized}.part{part}").with_suffix(".benchmark.tsv")
    params:
        format_version=lambda wildcards: FORMAT_VERSIONS[QUANTIZED[wildcards.quantized].steps.step],
        source=lambda wildcards: QUANTIZED[wildcards.quantized].source,
        folder=lambda wildcards: PATHS.model_root / wildcards.quantized,
        settings=lambda wildcards: QUANTIZED[wildcards.quantized].settings,
        num_parts=lambda wildcards: len(QUANTIZED[wildcards.quantized].parts),
        # Functions of `input` do not trigger a rerun.
        calibration=lambda wildcards, input: QUANTIZED[wildcards.quantized].calibration,
        step=lambda wildcards, input: QUANTIZED[wildcards.quantized].steps.step,
        title=lambda wildcards, input: QUANTIZED[wildcards.quantized].title,
        more=lambda wildcards, input: QUANTIZED[wildcards.quantized].more["quantize"],
    message:
        "quantise part {wildcards.part} of {params.num_parts} to {params.title}{params.more}"
    shell:
        runs(
            "quantize",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input.source:q} --calibration {params.calibration:q}",
            "--step {params.step} --folder {params.folder:q} --part {wildcards.part} --num-parts {params.num_parts}",
            "--threads {threads} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_quantized:
    """Joins the parts of recoded weights."""
    input:
        source=lambda wildcards: receipt_of(QUANTIZED[wildcards.quantized].source),
        parts=lambda wildcards: [
            part_receipt_of(PATHS.model_root / wildcards.quantized, part)
            for part in QUANTIZED[wildcards.quantized].parts
        ],
        calibration=lambda wildcards: CALIBRATED_BY.get(wildcards.quantized, []),
        allowed=lambda wildcards: may_serve(wildcards.quantized),
    output:
        update(receipt_of(QUANTIZED_FOLDER)),
    log:
        PATHS.store_log("finalize_quantized", ".{quantized}"),
    benchmark:
        PATHS.store_log("finalize_quantized", ".{quantized}").with_suffix(".benchmark.tsv")
    params:
        format_version=lambda wildcards: FORMAT_VERSIONS[QUANTIZED[wildcards.quantized].steps.finalize_step],
        source=lambda wildcards: QUANTIZED[wildcards.quantized].source,
        folder=lambda wildcards: PATHS.model_root / wildcards.quantized,
        settings=lambda wildcards: QUANTIZED[wildcards.quantized].settings,
        calibration=lambda wildcards, input: QUANTIZED[wildcards.quantized].calibration,
        step=lambda wildcards, input: QUANTIZED[wildcards.quantized].steps.step,
        title=lambda wildcards, input: QUANTIZED[wildcards.quantized].title,
        more=lambda wildcards, input: QUANTIZED[wildcards.quantized].more["finalize_quantized"],
    message:
        "join the {params.title} parts: index and config{params.more}"
    shell:
        runs(
            "finalize_quantized",
            FROM_CONFIG,
            "--source {params.source:q} --source-receipt {input.source:q} --calibration {params.calibration:q}",
            "--step {params.step} --folder {params.folder:q} --part-receipts {input.parts:q} --receipt {output:q}",
            where=IN_IMAGE,
        )


# Targets for the command line, because a rule with a wildcard cannot be one.
rule finalize_rollout_fp8:
    """Makes the engines' FP8 weights."""
    input:
        receipt_of(PATHS.rollout_fp8),
    localrule: True
    message:
        "the engines' FP8 weights are there"


rule finalize_serving:
    """Makes the weights in the format `serving.format`."""
    input:
        receipt_of(PATHS.serving),
    localrule: True
    message:
        f"the {CFG.serving.format} weights are there"


rule finalize_bf16:
    """Makes BF16 weights from a quantised source."""
    input:
        receipt_of(PATHS.bf16),
    localrule: True
    message:
        "the weights in BF16 are there"


# Not needed for training: it reads both checkpoints again.
rule verify_rollout_weights:
    """Answers: the error of FP8 weights."""
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
