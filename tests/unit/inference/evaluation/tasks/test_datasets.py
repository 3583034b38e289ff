"""Data sets: found, and read strictly."""

from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions
from inference.evaluation.run.checks import unreachable_data
from inference.evaluation.task import Sample
from inference.evaluation.tasks.datasets import choose_samples, read_rows
from inference.evaluation.tasks.lambada import Lambada


def test_missing_passages_are_named_with_the_command_that_gets_them(tmp_path):
    options = EvaluationOptions(output_dir=tmp_path, data_dir=tmp_path)
    (reported,) = unreachable_data(options)
    path = tmp_path / "lambada_test.jsonl"
    assert f"curl -o {path} https://" in reported
    own = LambadaOptions(data_path=tmp_path / "mine.jsonl")
    Path(str(own.data_path)).touch()
    assert unreachable_data(replace(options, lambada=own)) == []


def test_another_file_in_the_place_of_the_test_set_is_refused(tmp_path):
    path = tmp_path / "lambada_test.jsonl"
    path.write_bytes(b'{"text": "a b"}\n')
    task = Lambada(EvaluationOptions(output_dir=tmp_path, data_dir=tmp_path))
    with pytest.raises(ValueError, match="expected 4aa8d02cd17c"):
        task.prepare()


def test_every_malformed_line_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine here"}\nnot json\n{"words": 1}\n\n{"text": " "}\n')
    with pytest.raises(ValueError, match="is not a data set") as caught:
        read_rows(path, "text")
    assert [f"line {number}" in str(caught.value) for number in (1, 2, 3, 5)] == [
        False,
        True,
        True,
        True,
    ]


def test_a_separator_of_lines_inside_a_text_ends_no_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert [row["text"] for row in read_rows(path, "text")] == ["one\u2028two\x85three"]


def test_the_mark_and_line_ends_of_other_editors_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert [row["text"] for row in read_rows(path, "text")] == ["one", "two"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_refused_with_the_name_of_the_file(tmp_path, encoding):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "d\u00e9j\u00e0 vu"}\n', encoding=encoding)
    with pytest.raises(ValueError, match=r"data\.jsonl is not UTF-8 at byte"):
        read_rows(path, "text")


def test_an_empty_data_set_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no samples"):
        read_rows(path, "text")


def draw(**choice):
    samples = [Sample(index, str(index), target="") for index in range(100)]
    options = EvaluationOptions(data_dir=Path(), **choice)
    return choose_samples(samples, options, name="n", path="p", sha256="s")


def test_a_draw_is_repeatable_and_in_order():
    dataset, chosen = draw(limit=10, seed=7)
    assert chosen == draw(limit=10, seed=7)[1] == sorted(chosen, key=lambda each: each.index)
    assert chosen != draw(limit=10, seed=8)[1]
    assert (dataset.total, dataset.count, dataset.limit, dataset.seed) == (100, 10, 10, 7)


@pytest.mark.parametrize("limit", [None, 100, 1000])
def test_all_samples_are_asked_unless_the_limit_is_lower(limit):
    dataset, chosen = draw(limit=limit, seed=7)
    assert [each.index for each in chosen] == list(range(100))
    assert (dataset.count, dataset.limit, dataset.seed) == (100, None, None)
