# The model's files and the prompts, verified against their source.
from posttrain.store import manifest_of
from posttrain.store.data_folders import PASS, SUITE, wanted_rows
from posttrain.config.suites import data_of, rows_of
from posttrain.rl.data.raw_rows import local_files

SOURCE_FOLDER = PATHS.source_folder
# Folders made by a step have a receipt.
SOURCE_RECEIPT = receipt_of(SOURCE_FOLDER) if CFG.model.source.kind in ("made", "run") else []
# In a folder that no rule makes, a changed file is a changed source.
SOURCE_FILES = (
    sorted(path for path in Path(SOURCE_FOLDER).rglob("*") if path.is_file())
    if CFG.model.source.kind == "folder"
    else []
)

if CFG.model.source.kind == "made":
    KNOWN = (
        "multiplication with a calculator" if CFG.data.kind == "arithmetic" else f"{CFG.data.num_digits}-digit sorting"
    )
    TAUGHT = CFG.data.task or KNOWN

    rule make_tiny_model:
        """Makes a small model, warmed up on a task, in Hub layout."""
        output:
            update(receipt_of(PATHS.made_model)),
        log:
            PATHS.store_log("make_tiny_model"),
        benchmark:
            PATHS.store_log("make_tiny_model").with_suffix(".benchmark.tsv")
        params:
            format_version=FORMAT_VERSIONS["make_tiny_model"],
            architecture=ARCHITECTURE,
            num_digits=CFG.data.num_digits,
            seed=0,
            folder=PATHS.made_model,
        message:
            f"make {CFG.model.name} of {TAUGHT} with a short supervised warm-up{NEEDS.message('make_tiny_model')}"
        shell:
            runs(
                "make_tiny_model",
                FROM_CONFIG,
                "--num-digits {params.num_digits}",
                "--seed {params.seed} --folder {params.folder:q} --receipt {output:q}",
                where=IN_IMAGE,
            )


HF_PARTS = parts_of(PATHS.hf, CFG.download.num_parts)


rule list_hf_checkpoint:
    """Lists the files of a Hub repository or a folder, with sizes and hashes."""
    input:
        made=SOURCE_RECEIPT,
        files=SOURCE_FILES,
    output:
        update(manifest_of(PATHS.hf)),
    log:
        PATHS.store_log("list_hf_checkpoint"),
    benchmark:
        PATHS.store_log("list_hf_checkpoint").with_suffix(".benchmark.tsv")
    localrule: True
    resources:
        num_retries=CFG.download.num_retries,
    params:
        source=(
            ["--kind", "hub", "--repo-id", CFG.model.source.repo_id, "--revision", CFG.model.source.revision]
            if CFG.model.source.kind == "hub"
            else ["--kind", "folder", "--source-folder", SOURCE_FOLDER]
        ),
        made=lambda wildcards, input: ["--source-receipt", input.made] if input.made else [],
        folder=PATHS.hf,
    message:
        f"list the files of {SIZE} ({CFG.model.source.kind}){NEEDS.message('list_hf_checkpoint')}"
    shell:
        runs(
            "list_hf_checkpoint",
            "{params.source:q} {params.made:q}",
            "--folder {params.folder:q} --num-retries {resources.num_retries} --manifest {output:q}",
        )


rule download_hf_checkpoint:
    """Fetches one part of a checkpoint, each file verified."""
    input:
        manifest_of(PATHS.hf),
    output:
        update(part_receipt_of(PATHS.hf, "{part}")),
    log:
        PATHS.store_log("download_hf_checkpoint", ".part{part}"),
    benchmark:
        PATHS.store_log("download_hf_checkpoint", ".part{part}").with_suffix(".benchmark.tsv")
    # A change of the transfer's settings does not fetch files again.
    resources:
        num_workers=CFG.download.num_workers,
        num_retries=CFG.download.num_retries,
        xet=int(CFG.download.xet),
    params:
        format_version=FORMAT_VERSIONS["download_hf_checkpoint"],
        folder=PATHS.hf,
        num_parts=len(HF_PARTS),
    message:
        f"fetch part {{wildcards.part}} of {{params.num_parts}} of {SIZE} ({CFG.model.source.kind}), verify every file{NEEDS.message('download_hf_checkpoint')}"
    shell:
        runs(
            "download_hf_checkpoint",
            "--manifest {input:q} --folder {params.folder:q}",
            "--part {wildcards.part} --num-parts {params.num_parts} --threads {resources.num_workers}",
            "--num-retries {resources.num_retries} --xet {resources.xet} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule finalize_hf_checkpoint:
    """Joins the fetched parts and checks the checkpoint's layout."""
    input:
        manifest=manifest_of(PATHS.hf),
        parts=[part_receipt_of(PATHS.hf, part) for part in HF_PARTS],
    output:
        update(receipt_of(PATHS.hf)),
    log:
        PATHS.store_log("finalize_hf_checkpoint"),
    benchmark:
        PATHS.store_log("finalize_hf_checkpoint").with_suffix(".benchmark.tsv")
    params:
        format_version=FORMAT_VERSIONS["finalize_hf_checkpoint"],
        folder=PATHS.hf,
    message:
        f"join the parts of {SIZE}, check its layout{NEEDS.message('finalize_hf_checkpoint')}"
    shell:
        runs(
            "finalize_hf_checkpoint",
            "--manifest {input.manifest:q}",
            "--part-receipts {input.parts:q} --folder {params.folder:q} --receipt {output:q}",
            where=IN_IMAGE,
        )


rule download_dataset:
    """Gets the prompts and checks every line."""
    input:
        lambda wildcards: may_read(local_files(CFG.data)),
    output:
        update(receipt_of(PATHS.dataset)),
    log:
        Path("logs") / "download_dataset" / f"{PATHS.dataset.name}.log",
    benchmark:
        Path("logs") / "download_dataset" / f"{PATHS.dataset.name}.benchmark.tsv"
    resources:
        num_retries=CFG.download.num_retries,
    params:
        format_version=FORMAT_VERSIONS["download_dataset"],
        # A function, because braces in a prompt template are not wildcards; also in other rules.
        data=lambda wildcards: with_times(json.dumps(RESOLVED.experiment["data"]), local_files(CFG.data)),
        folder=PATHS.dataset,
    message:
        f"get the prompts ({CFG.data.kind}) and check every line{NEEDS.message('download_dataset')}"
    shell:
        runs(
            "download_dataset",
            FROM_CONFIG,
            "--folder {params.folder:q}",
            "--num-retries {resources.num_retries} --receipt {output:q}",
            where=IN_IMAGE,
        )


# Folder's name -> (kind, name, configuration), so that suites or passes with the same rows share a job.
ROWS = {
    folder.name: (kind, name, wanted_rows(CFG, kind)[name])
    for kind, folders in ((SUITE, SUITE_FOLDERS), (PASS, PASS_FOLDERS))
    for name, folder in folders.items()
}


rule download_rows:
    """Gets the prompts of an evaluation suite, or the conversations of a calibration pass, and checks every line."""
    input:
        lambda wildcards: may_read(local_files(data_of(ROWS[wildcards.rows][2]))),
    output:
        update(receipt_of(PATHS.store / "datasets" / "{rows}")),
    log:
        Path("logs") / "download_rows" / "{rows}.log",
    benchmark:
        Path("logs") / "download_rows" / "{rows}.benchmark.tsv"
    resources:
        num_retries=CFG.download.num_retries,
    params:
        format_version=lambda wildcards: FORMAT_VERSIONS[f"download_{ROWS[wildcards.rows][0]}"],
        rows=lambda wildcards: with_times(
            json.dumps(rows_of(ROWS[wildcards.rows][2])), local_files(data_of(ROWS[wildcards.rows][2]))
        ),
        kind=lambda wildcards: ROWS[wildcards.rows][0],
        name=lambda wildcards: ROWS[wildcards.rows][1],
        folder=lambda wildcards: PATHS.store / "datasets" / wildcards.rows,
    message:
        f"get the rows of {{params.name}} and check every line{NEEDS.message('download_rows')}"
    shell:
        runs(
            "download_rows",
            FROM_CONFIG,
            "--kind {params.kind} --name {params.name:q} --folder {params.folder:q}",
            "--num-retries {resources.num_retries} --receipt {output:q}",
            where=IN_IMAGE,
        )
