# Actions at the start and the end of a run.
from posttrain.store.receipts import BACKUPS_VARIABLE

# Snakemake copies outputs marked `update` to this folder, and restores them if their job fails. A step that begins to
# change a folder deletes its receipt, including this copy.
os.environ[BACKUPS_VARIABLE] = os.path.abspath(os.path.join(".snakemake", "backups"))


onsuccess:
    # Snakemake has planned wrongly before (`until_made`), so check that all targets exist.
    wanted = {path for job in workflow.dag.targetjobs for path in (job.output or job.input)}
    if missing := sorted(path for path in map(str, wanted) if not os.path.exists(path)):
        ENDING.add(lambda: f"no step has failed, but this was not made: {', '.join(missing)}; run again with `-n`")
        tell("failed")
        sys.exit(1)
    tell("ended")


onerror:
    tell("failed" if ENDING.words() else "interrupted")


onstart:
    if words := refused():
        ENDING.add(lambda: words)
        sys.exit(1)
    jobs = list(workflow.dag.needrun_jobs())
    outputs = [path for job in jobs for path in job.output]
    records = [workflow.persistence.path / "any", *(path for job in jobs for path in job.log)]
    try:
        make_shared_roots(CFG)
        share_store(PATHS.store, CFG.site.store_group, outputs)
        # Commands without outputs (status, gc) may run on a full disk.
        require_writable([*outputs, *records] if outputs else [])
    except OSError as error:
        words = explain(error) or str(error)
        ENDING.add(lambda: words)
        sys.exit(1)
