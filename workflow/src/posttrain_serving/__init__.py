"""Annex: how a checkpoint is served, how fast an endpoint answers, and what a precision costs.

Doors: `posttrain serve` (`command.main`), `posttrain benchmark` (`benchmark.command.main`), and the rules
`benchmark_serving`, `ask_precision` and `compare_precisions`, whose scripts import it. Takes engines, plans and
checkpoints from `posttrain`. docs/serving.md, docs/evaluation.md and docs/checkpoints.md are its pages.
"""
