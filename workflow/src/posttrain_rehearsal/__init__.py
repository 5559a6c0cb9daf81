"""Annex: two steps of a training at full size, without a GPU.

The command is `posttrain rehearse` (`command.main`). It writes its result as JSON into the plan's folder, where
`posttrain.plan.rehearsal_record` reads it. It runs the real trainer of `posttrain` on simulated devices, collectives
and kernels. See docs/planning.md.
"""
