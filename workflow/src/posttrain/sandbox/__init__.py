"""Runs untrusted programs: without a network, on a root of their own, within limits."""
