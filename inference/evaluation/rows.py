"""Rows of the text tasks' data files: fields for the prompt, and the right answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORD_START = "\u2581"  # the mark that SentencePiece puts before a word
_NLI_LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Row:
    """One row: fields by name, right answers, and the part of the data it belongs to."""

    fields: Mapping[str, str]
    targets: tuple[str, ...]
    group: str = ""


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a JSON Lines file.

    Raises:
        ValueError: a line is not an object, or there is none; all bad lines are named.
    """
    rows: list[Mapping[str, Any]] = []
    problems: list[int] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        row = _parsed(line)
        if row is None:
            problems.append(number)
        else:
            rows.append(row)
    if problems:
        shown = ", ".join(map(str, problems[:10]))
        raise ValueError(f"{path} is not JSON Lines: line {shown} is no object.")
    if not rows:
        raise ValueError(f"{path} holds no rows; expected one JSON object a line.")
    return rows


def _parsed(line: str) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _need(rows: Sequence[Mapping[str, Any]], path: Path, *names: str) -> None:
    """Raise ValueError unless every row has the fields `names`, as text."""
    for number, row in enumerate(rows, start=1):
        missing = [name for name in names if not isinstance(row.get(name), str)]
        if missing:
            raise ValueError(
                f"{path}, row {number}: no text in {', '.join(missing)}; it has {', '.join(row)}."
            )


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in row.items() if isinstance(value, str)}


def boolq_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Row]:
    """Return rows with `passage`, `question` and an answer that is `true` or `false`.

    The answer is `answer` (as NeMo's prompt-learning files have it) or `label` (SuperGLUE).

    Raises:
        ValueError: a row lacks a field or has another answer.
    """
    _need(rows, path, "passage", "question")
    found = []
    for number, row in enumerate(rows, start=1):
        answer = str(row.get("answer", row.get("label", ""))).lower()
        answer = {"1": "true", "0": "false"}.get(answer, answer)
        if answer not in ("true", "false"):
            raise ValueError(f"{path}, row {number}: the answer is {answer!r}, not true or false.")
        found.append(Row(_texts(row), (answer,)))
    return found


def nli_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Row]:
    """Return rows with `premise`, `hypothesis` and `label`, by name or 0, 1, 2; `language` groups.

    Raises:
        ValueError: a row lacks a field or has another label.
    """
    _need(rows, path, "premise", "hypothesis")
    found = []
    for number, row in enumerate(rows, start=1):
        label = row.get("label")
        if isinstance(label, int) and 0 <= label < len(_NLI_LABELS):
            label = _NLI_LABELS[label]
        if label not in _NLI_LABELS:
            known = ", ".join(_NLI_LABELS)
            raise ValueError(f"{path}, row {number}: the label is {label!r}, not one of {known}.")
        found.append(Row(_texts(row), (str(label),), group=str(row.get("language", ""))))
    return found


def summarization_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Row]:
    """Return rows with `article` and `highlights`.

    Raises:
        ValueError: a row lacks a field.
    """
    _need(rows, path, "article", "highlights")
    return [
        Row({"article": row["article"].strip().replace(" n't", "n't")}, (row["highlights"],))
        for row in rows
    ]


def squad_rows(path: Path) -> list[Row]:
    """Return rows with `context`, `question` and all answers, from JSON Lines or official JSON.

    Raises:
        ValueError: a row lacks a field or has no answer.
    """
    text = path.read_text(encoding="utf-8")
    rows: Sequence[Mapping[str, Any]]
    whole = _parsed(text)
    rows = _official_squad(whole) if whole is not None and "data" in whole else read_rows(path)
    _need(rows, path, "context", "question")
    found = []
    for number, row in enumerate(rows, start=1):
        targets = tuple(dict.fromkeys(map(str, row.get("answers", ()))))
        if not targets:
            raise ValueError(f"{path}, row {number}: no answers.")
        found.append(Row(_texts(row), targets))
    return found


def _official_squad(whole: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        {
            "context": paragraph["context"],
            "question": question["question"],
            "answers": [answer["text"] for answer in question["answers"]],
        }
        for article in whole["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def translation_rows(path: Path, target_path: Path | None) -> list[Row]:
    """Return source and target lines; SentencePiece marks between their words are taken out.

    Without a target file the source is JSON Lines with `source` and `target`.

    Raises:
        ValueError: the files differ in length, or a row lacks a field.
    """
    if target_path is None:
        rows = read_rows(path)
        _need(rows, path, "source", "target")
        return [Row({"source": row["source"]}, (row["target"],)) for row in rows]
    sources, targets = (
        [_detokenised(line) for line in each.read_text(encoding="utf-8").splitlines()]
        for each in (path, target_path)
    )
    if len(sources) != len(targets) or not sources:
        raise ValueError(
            f"{path} has {len(sources)} lines and {target_path} has {len(targets)}; they must "
            "correspond line by line."
        )
    return [Row({"source": s}, (t,)) for s, t in zip(sources, targets, strict=True)]


def _detokenised(line: str) -> str:
    if _WORD_START not in line:
        return line.strip()
    return line.replace(" ", "").replace(_WORD_START, " ").strip()
