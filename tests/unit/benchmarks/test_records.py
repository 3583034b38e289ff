"""Records of benchmarks: their files, their comparison, and the tables written from them."""

import re
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import contenders, decode, protocol, records, throughput
from benchmarks.contenders import OnTokens, Request
from benchmarks.models import SIZES, Model
from benchmarks.program import CASES, case_options, run
from benchmarks.records import Record, regressions, with_tables
from tests.conftest import ROOT

OLD = Record(
    command="python -m benchmarks.throughput",
    commit="abc1234",
    date="2026-01-31",
    machine="1 x NVIDIA H200",
    versions={"torch": "2.11.0"},
    rows={
        "batch 1": {"slipway": "100 tokens/s", "vLLM": "90 tokens/s"},
        "first token": {"slipway": "20.0 ms"},
        "tokens": {"slipway": "4 of 4 equal"},
    },
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    OLD.write(tmp_path / "one.json")
    assert Record.read(tmp_path / "one.json") == OLD


@pytest.mark.parametrize(
    ("row", "value", "is_worse"),
    [
        ("batch 1", "96 tokens/s", False),
        ("batch 1", "94 tokens/s", True),
        ("batch 1", "200 tokens/s", False),
        ("first token", "20.9 ms", False),
        ("first token", "21.2 ms", True),
        ("first token", "10.0 ms", False),
        ("first token", "1.0 s", True),
        ("tokens", "1 of 4 equal", True),
    ],
)
def test_rows_that_fell_by_more_than_the_noise_are_named(row, value, is_worse):
    rows = {**OLD.rows, row: {**OLD.rows[row], "slipway": value}}
    found = regressions(OLD, replace(OLD, rows=rows), noise=0.05)
    assert [line.partition(",")[0] for line in found] == ([row] if is_worse else [])


def test_a_row_that_vanished_is_named():
    rows = {"batch 1": {"slipway": "100 tokens/s"}}
    found = regressions(OLD, replace(OLD, rows=rows), noise=0.05)
    assert found == [
        "batch 1, vLLM: 90 tokens/s, now absent",
        "first token, slipway: 20.0 ms, now absent",
        "tokens, slipway: 4 of 4 equal, now absent",
    ]


def test_the_command_ends_with_1_if_a_row_fell(tmp_path, capsys):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    rows = {**OLD.rows, "first token": {"slipway": "30.0 ms"}}
    OLD.write(paths[0])
    replace(OLD, rows=rows).write(paths[1])
    assert records.main(["compare", str(paths[0]), str(paths[0])]) == 0
    assert records.main(["compare", str(paths[0]), str(paths[1])]) == 1
    assert "first token, slipway: 20.0 ms, now 30.0 ms (-33%)" in capsys.readouterr().out


def test_a_table_is_written_from_its_record(tmp_path):
    OLD.write(tmp_path / "one.json")
    text = "Before\n<!-- record one -->\nstale\n<!-- end -->\nafter\n"
    written = with_tables(text, tmp_path)
    assert "| batch 1 | 100 tokens/s | 90 tokens/s |\n| first token | 20.0 ms | - |\n" in written
    assert "Commit abc1234, 2026-01-31, 1 x NVIDIA H200; torch 2.11.0:" in written
    assert "stale" not in written
    assert written.startswith("Before\n")
    assert written.endswith("\nafter\n")


def test_the_tables_of_documents_are_those_of_the_records():
    named: list[str] = []
    for name in ("performance.md", "reliability.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        named += re.findall(r"<!-- record ([\w.-]+) -->", text)
        assert with_tables(text) == text
    assert sorted(named) == sorted(path.stem for path in records.RESULTS.glob("*.json"))


@pytest.mark.parametrize("document", ["README.md", "docs/performance.md"])
def test_every_figure_that_a_document_quotes_is_in_a_record(document):
    text = (ROOT / document).read_text(encoding="utf-8").replace(",", "")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # what a command prints
    found = [Record.read(path) for path in records.RESULTS.glob("*.json")]
    values = {value for each in found for row in each.rows.values() for value in row.values()}
    quoted = set(re.findall(r"\b\d[\d.]* (?:(?:prompt tokens|tokens|requests|MB)/s|ms|s)\b", text))
    assert quoted
    assert quoted <= values


def test_a_program_prints_and_records_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one", "--batch", "4", "--record", str(tmp_path / "a.json")])
    run(lambda args: [(f"batch {args.batch[0]}", "ours", "8 tokens/s")], "One.", {"batch": {}})
    assert Record.read(tmp_path / "a.json").rows == {"batch 4": {"ours": "8 tokens/s"}}
    assert "| batch 4 | 8 tokens/s |" in capsys.readouterr().out


class Echo:
    """An engine that answers at once."""

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        for tokens in range(1, request.output_len + 1):
            if on_tokens is not None:
                on_tokens(number, tokens)

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("program", [decode, protocol, throughput])
def test_the_cases_of_a_program_are_made_of_its_options(program):
    cases = CASES[program.__name__.partition(".")[2]]
    for name in cases:
        options = case_options(cases, name)
        assert options.keys() <= program.OPTIONS.keys(), name
        assert options["model"] in SIZES


def test_every_row_of_a_case_is_measured(tmp_path):
    defaults = {name: each.get("default") for name, each in throughput.OPTIONS.items()}
    args = Namespace(**{**defaults, **case_options(CASES["throughput"], "demo"), "rate": None})
    found = [row for row, _ in throughput.rows(Echo(), Model(tmp_path, 640), args)]
    assert {"mixed, again", "batch 2, a step", "2 long prompts", "a prompt of 24"} <= {*found}
    assert found[-1] == "80% of the mixed requests' rate, between tokens p99"


def test_the_time_of_llama_cpp_is_its_own(tmp_path, monkeypatch):
    program = tmp_path / "bench"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho \'{{"t_pp": 1, "t": 2.5}}\'\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(contenders, "_gguf_file", lambda _, kind: tmp_path / kind)
    model = Model(tmp_path, 640)
    generate = contenders.llama_cpp(model, data_type="int8", threads=2, program=program)
    assert generate([[1] * 6] * 3, 4, print) == 2.5
    words = (tmp_path / "words").read_text().split()
    given = dict(pairwise(words))
    assert {given[each] for each in ("-npp", "-ntg", "-npl", "-c", "-m")} == {
        "6", "4", "3", "30", str(tmp_path / "Q8_0")
    }  # fmt: skip
