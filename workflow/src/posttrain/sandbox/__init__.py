"""Runs untrusted programs: without a network, on a root of their own, within limits.

`run.run` starts a Python program in a new bubblewrap sandbox and returns what it printed and how it ended;
`client.runner_of` returns the same call for a configuration, which may name a service on other nodes.
"""
