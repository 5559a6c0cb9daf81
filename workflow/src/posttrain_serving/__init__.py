"""Annex: serving a checkpoint, the speed of an endpoint, and the quality loss of a precision.

Entry points: `posttrain serve` (`command.main`), `posttrain benchmark` (`benchmark.command.main`), and the rules
`benchmark_serving`, `ask_precision` and `compare_precisions`. Engines, plans and checkpoints come from `posttrain`. See
docs/serving.md, docs/evaluation.md and docs/checkpoints.md.
"""
