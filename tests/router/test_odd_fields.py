"""Fields of a chat of any JSON type: its rendering here is exact or left to the engine, and never a fault."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_router.errors import NotExact
from kvist_router.tokens.messages import engine_messages
from kvist_router.tokens.responses import as_chat
from kvist_router.tokens.variables import template_variables

NAMES = ["role", "content", "type", "text", "name", "function", "parameters", "arguments", "id", "effort"]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*NAMES, "user", "assistant"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
VARIABLES = ["reasoning_effort", "tools", "documents", "chat_template_kwargs"]
MESSAGE = ["content", "tool_calls", "tool_call_id", "name", "reasoning"]
RESPONSE = ["instructions", "reasoning", "tools", "truncation", "chat_template_kwargs"]


@given(st.sampled_from(VARIABLES), VALUES)
def test_variables_of_the_template(field: str, value: Any) -> None:
    with contextlib.suppress(NotExact):
        template_variables({field: value}, {"tools", "documents", "reasoning_effort", "enable_thinking"})


@given(
    st.sampled_from(["user", "assistant", "tool", "system", "developer"]) | VALUES,
    st.dictionaries(st.sampled_from(MESSAGE), VALUES),
    st.booleans(),
)
def test_messages(role: Any, fields: dict[str, Any], parts: bool) -> None:
    with contextlib.suppress(NotExact):
        engine_messages([{"role": role, **fields}], parts, developer=False)


@given(st.text(max_size=3) | st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from(RESPONSE), VALUES))
def test_responses(text: Any, fields: dict[str, Any]) -> None:
    with contextlib.suppress(NotExact):
        as_chat({"input": text, **fields})


@pytest.mark.parametrize("effort", [[], {}, ["low"], 5, True, "other"])
def test_an_effort_that_is_none_is_the_engines_to_judge(effort: Any) -> None:
    with pytest.raises(NotExact):
        template_variables({"reasoning_effort": effort}, {"reasoning_effort"})
