"""Every key of the schema with wrong types, signs, sizes and shapes: refused by its name."""

import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import to_jsonable_python

from foundations.values import Key, WrongValuesError, build_record
from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.diagnosis import read_override
from launcher_scripts.configuration.schema import KEYS, Config

_LONG = "x" * 300
_MAPPING, _LIST = "{a: 1}", "[a]"


def wrong_values(key: Key) -> Iterator[str]:
    """Yield values that a key must refuse, as they are typed."""
    kinds = key.kinds
    origin = typing.get_origin(key.type)
    if type(None) not in kinds and Any not in kinds:
        yield "null"
    if key.choices:
        yield from ("nope", _LIST, _MAPPING, "-1")
    elif origin in (list, tuple):
        yield from ("5", "a", _MAPPING, *(["[[1]]", "[{a: 1}]"] if Any not in kinds else []))
        if int in kinds:
            yield from ("[x]", "[1.5]", "[true]", "[-1]", f"[{10**30}]")
    elif origin is dict:
        yield from ("5", "a", "[1]")
    elif bool in kinds:
        yield from ("2", "1.5", "maybe", "[true]", _MAPPING)
    elif {int, float} & kinds and str not in kinds:
        assert key.ge is not None, f"{key.name} has no range"
        assert key.le is not None, f"{key.name} has no range"
        yield from ("x", "true", "[1]", _MAPPING, f"{key.ge - 1:.0f}", f"{key.le + 1:.0f}")
        yield from ("1.5", "''") if int in kinds else ("nan", "inf", "-inf", str(10**30))
    elif {str, Path} & kinds:
        yield from (_LIST, _MAPPING)
        if not key.has_lines:
            yield from ("'a\nb'", "'a\a'", "x" * 5000)
        if key.is_path:
            yield from ("''", f"/tmp/{_LONG}", "$NO_SUCH_VARIABLE/x", "/x" * 3000)
        if key.is_name:
            yield from ("''", ".", "..", "a/b", "'a b'", "-a", "a:b", _LONG)


@cache
def typed(text: str) -> Any:
    """Return the value that a text stands for, whatever key it is given to."""
    return read_override(f"key={text}").value()


def test_every_wrong_value_of_every_key_is_refused_by_its_name():
    # `cluster_type` is translated before anything is composed: see test_arguments.
    wrong = {name: list(wrong_values(key)) for name, key in KEYS.items() if name != "cluster_type"}
    for name in (key.name for key in KEYS.values() if key.form is not None):
        wrong[name].append("[/no:form]" if KEYS[name].is_list else "/no:form")
    assert [name for name in wrong if not wrong[name] and KEYS[name].type is not Any] == []
    config = compose_config([]).config
    assert config is not None
    usual = {name: to_jsonable_python(config.at(name)) for name in KEYS}
    for number in range(max(map(len, wrong.values()))):
        words = {name: typed(wrong[name][number]) for name in wrong if wrong[name][number:]}
        with pytest.raises(WrongValuesError) as caught:
            build_record(Config, usual | words)
        assert caught.value.problems.keys() == words.keys()
        for name, text in caught.value.problems.items():
            assert re.split("[=:]", text)[0] == name
            assert len(text) < 800


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
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
def test_whatever_is_written_is_composed_or_named(words):
    typed = [f"{name}={value}" for name, value in words]
    arguments = read_arguments(typed)
    problems = [*arguments.problems, *compose_config(arguments.overrides).problems]
    for text in problems:
        assert any(name in text or repr(name)[1:-1] in text for name, _ in words), text


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("deploy.vllm=[a]", "expected a mapping"),
        ("base_results_dir=2024", "expected a path; write ./ before a name of digits"),
        ("stages={a: 1}", "expected a list"),
        ("stages='[deploy]'", "write 'stages=[deploy]'"),
    ],
)
def test_a_value_of_another_shape_is_refused_with_the_remedy(word, remedy):
    (problem,) = compose_config([word]).problems
    assert remedy in problem
