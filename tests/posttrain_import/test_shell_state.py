"""What is known of a script's variables and functions after something unknown, or after branches."""

from __future__ import annotations

from typing import Any

from posttrain_import.script import Word
from posttrain_import.shell_state import State, Variable

FOUR = Word("4", "line 1", "")
BODY: Any = object()


def joined(*states: State) -> State:
    found = State()
    found.become(states, "branches differ")
    return found


def test_a_scalar_that_was_forgotten_can_be_set_again() -> None:
    state = State()
    state.forget(["X"], "read from a file")
    state.assign("X", [FOUR])
    assert state.get("X") == Variable((FOUR,))


def test_a_function_that_one_branch_defines_is_not_known() -> None:
    assert joined(State(functions={"f": BODY}), State()).functions == {"f": None}
    assert joined(State(), State(functions={"f": BODY})).functions == {"f": None}
    assert joined(State(functions={"f": BODY}), State(functions={"f": BODY})).functions == {"f": BODY}


def test_an_attribute_of_one_branch_stays() -> None:
    assert joined(State(fixed=frozenset({"X"})), State()).fixed == {"X"}
    assert joined(State(), State(fixed=frozenset({"X"}))).fixed == {"X"}
