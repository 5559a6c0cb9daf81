"""Run two training steps of a configuration at full size without a GPU, and report what would fail on one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from posttrain.cluster.processes import scratch_folder
from posttrain.errors import Problem, raise_if_any
from posttrain.plan.forecast.plan_page import plan_title
from posttrain.plan.rehearsal_record import file_of
from posttrain.store import Paths, write_json, write_text
from posttrain_rehearsal.outcome import judge, render
from posttrain_rehearsal.start import rehearse, require_rehearsable


def main(paths: Paths) -> None:
    """Rehearse, write the JSON and the page, and raise the problems."""
    require_rehearsable(paths.resolved)
    with scratch_folder("rehearsal-"), ThreadPoolExecutor(1) as beside:
        # It imports torch, which creates folders and which importers of this module do not need.
        from posttrain_rehearsal.engine_side import rehearse_engines

        of_engines = beside.submit(rehearse_engines, paths.resolved.config)
        found = rehearse(paths.resolved)
        engines = of_engines.result()
    found["engine_side"] = engines
    found["problems"] += engines["problems"]
    found["stand_ins"] |= engines["stand_ins"]
    page = file_of(paths).with_suffix(".html")
    write_text(page, render(found, plan_title(paths.resolved.config)))
    write_json(file_of(paths), found)
    judge(found).print()
    print(f"engines: {engines['not_rehearsed'] or 'rehearsed, too'}", flush=True)
    print(f"rehearsal: {page.resolve()}", flush=True)
    raise_if_any([Problem(**problem) for problem in found["problems"]])
