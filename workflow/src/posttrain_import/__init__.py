"""Annex: a configuration from a launch script of slime or miles.

Door: `posttrain import-flags` (`command.main`). Takes from `posttrain`: `config`, `planner`, `artifacts` and `errors`.
docs/coming-from.md is its page.
"""
