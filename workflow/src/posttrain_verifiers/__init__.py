"""Serves environments of verifiers (0.4.0) to posttrain; runs in the Python environment of that library.

Verifiers finds a harness by the name of a package whose `__all__` has one class of it.
"""

from typing import Any

__all__ = ["ChatHarness"]


def __getattr__(name: str) -> Any:
    """Import the harness when verifiers asks for it: modules here that need no verifiers can be read without it."""
    if name not in __all__:
        raise AttributeError(name)
    from posttrain_verifiers.harness import ChatHarness

    return ChatHarness
