"""Annex: two steps of a training at full size, without a GPU.

Door: `posttrain rehearse` (`command.main`). What it finds lies beside the plan as JSON, which
`posttrain.plan.rehearsal_record` reads. It runs the trainer of `posttrain` as it is and replaces what it stands on:
devices, collectives, kernels. docs/planning.md is its page.
"""
