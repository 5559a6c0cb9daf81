"""Annex: imports a configuration from a launch script of slime or miles.

The command is `posttrain import-flags` (`command.main`). It uses `config`, `plan`, `store` and `errors` of `posttrain`.
See docs/coming-from.md.
"""
