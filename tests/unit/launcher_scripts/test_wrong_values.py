"""Every key of the schema with wrong types, signs, sizes and shapes: refused by its name."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_scripts.values import Key
from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.schema import KEYS

_LONG = "x" * 300
_MAPPING, _LIST = "{a: 1}", "[a]"


def wrong_values(key: Key) -> Iterator[str]:
    """Yield values that a key must refuse, as they are typed."""
    (kind,) = [each for each in key.types if each is not type(None)]
    if type(None) not in key.types and kind is not Any:
        yield "null"
    if key.choices:
        yield from ("nope", _LIST, _MAPPING, "-1")
    elif typing.get_origin(kind) is list:
        yield from ("5", "a", _MAPPING, "[[1]]", "[{a: 1}]")
        if typing.get_args(kind) == (int,):
            yield from ("[x]", "[1.5]", "[true]", "[-1]", f"[{10**30}]")
    elif typing.get_origin(kind) is dict:
        yield from ("5", "a", "[1]")
    elif kind is bool:
        yield from ("2", "0", "yes", "on", "'true'", "1.5", "[true]", _MAPPING)
    elif kind in (int, float):
        assert key.within is not None, f"{key.name} has no range"
        low, high = key.within
        yield from ("x", "true", "[1]", _MAPPING, f"{low - 1:.0f}", f"{high + 1:.0f}", str(10**30))
        yield from ("1.5", "''") if kind is int else ("nan", "inf", "-inf")
    elif kind is str:
        yield from (_LIST, _MAPPING)
        if not key.has_lines:
            yield from ("'a\nb'", "'a\a'")
        if key.is_path:
            yield from ("''", f"/tmp/{_LONG}", "$NO_SUCH_VARIABLE/x")
        if key.is_name:
            yield from ("''", ".", "..", "a/b", "'a b'", "-a", "a:b", _LONG)


# `cluster_type` is translated before anything is composed: see test_arguments.
WRONG = [
    (key.name, f"{key.name}={value}")
    for key in KEYS.values()
    if key.name != "cluster_type"
    for value in wrong_values(key)
]


def test_every_wrong_value_of_every_key_is_refused_by_its_name() -> None:
    free = {name for name, key in KEYS.items() if key.type is Any} | {"cluster_type"}
    assert {name for name, _ in WRONG} >= set(KEYS) - free
    composition = compose_config([word for _, word in WRONG])
    said = [re.split("[=:]| names ", text)[0] for text in composition.problems]
    assert said == [name for name, _ in WRONG]
    assert all(len(text) < 800 for text in composition.problems)
    # The refused command has left no trace.
    assert composition.config == compose_config([]).config


@pytest.mark.parametrize("text", ["x" * 5000, "/x" * 3000, "/" + "x" * 300])
def test_texts_and_paths_are_as_long_as_the_system_takes_them(text: str) -> None:
    for key in KEYS.values():
        if str in key.types and not key.has_lines and not (len(text) < 4096 and not key.is_path):
            found = key.problem(text)
            assert found is not None, key.name
            assert found.startswith(f"{key.name}=")
            assert len(found) < 500


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(
        st.tuples(
            st.sampled_from(sorted(KEYS)),
            st.one_of(
                st.integers(),
                st.floats(),
                st.booleans(),
                st.none(),
                st.text(max_size=40),
                st.lists(st.one_of(st.integers(), st.text(max_size=9)), max_size=3),
                st.dictionaries(st.text("ab", min_size=1), st.integers(), max_size=2),
            ),
        ),
        min_size=20,
        max_size=40,
    )
)
def test_whatever_is_written_is_composed_or_named(words: list[tuple[str, Any]]) -> None:
    typed = [f"{name}={value}" for name, value in words]
    arguments = read_arguments(typed)
    problems = [*arguments.problems, *compose_config(arguments.overrides).problems]
    for text in problems:
        assert any(name in text or repr(name)[1:-1] in text for name, _ in words), text
