"""Rows of data files, read strictly: fields for the prompt, and the right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.files.json_content import json_object

_WORD_START = "\u2581"  # the mark that SentencePiece puts before a word
_MOST_SHOWN = 10
_NLI_LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Row:
    """One row: fields by name, right answers, and the part of the data it belongs to."""

    fields: Mapping[str, str]
    targets: tuple[str, ...]
    group: str = ""


def read_rows(path: Path, *texts: str) -> list[Mapping[str, Any]]:
    """Return the objects of a JSON Lines file, each with the fields `texts`, which are not blank.

    Raises:
        ValueError: lines that are not such an object (the first are named), or an empty file.
    """
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_checked(json_object(line, f"line {number}"), f"line {number}", texts))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        shown = "\n  ".join(problems[:_MOST_SHOWN])
        more = len(problems) - _MOST_SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        raise ValueError(f"{path} is not a data set of this form:\n  {shown}{rest}")
    if not rows:
        raise ValueError(f"{path} holds no samples; expected one JSON object a line.")
    return rows


def _text_of(path: Path) -> str:
    """Return a file's text, without the byte order mark that some editors write.

    Its lines end at a line feed only: a JSON string may contain U+2028.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {error.start}; convert it, for example with iconv."
        ) from error


def _checked(row: Mapping[str, Any], place: str, texts: Sequence[str]) -> Mapping[str, Any]:
    """Return a row that has fields of text. Raises ValueError if it lacks one."""
    missing = [
        name for name in texts if not isinstance(row.get(name), str) or not row[name].strip()
    ]
    if missing:
        raise ValueError(
            f"{place} has no text in field {', '.join(missing)}; it has "
            f"{', '.join(row) or 'nothing'}"
        )
    return row


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in row.items() if isinstance(value, str)}


def boolq_rows(path: Path) -> list[Row]:
    """Return rows with `passage`, `question` and an answer that is `true` or `false`.

    The answer is `answer` (as NeMo's prompt-learning files have it) or `label` (SuperGLUE).

    Raises:
        ValueError: a row lacks a field or has another answer.
    """
    found = []
    for number, row in enumerate(read_rows(path, "passage", "question"), start=1):
        answer = str(row.get("answer", row.get("label", ""))).lower()
        answer = {"1": "true", "0": "false"}.get(answer, answer)
        if answer not in ("true", "false"):
            raise ValueError(f"{path}, row {number}: the answer is {answer!r}, not true or false.")
        found.append(Row(_texts(row), (answer,)))
    return found


def nli_rows(path: Path) -> list[Row]:
    """Return rows with `premise`, `hypothesis` and `label`, by name or 0, 1, 2; `language` groups.

    Raises:
        ValueError: a row lacks a field or has another label.
    """
    found = []
    for number, row in enumerate(read_rows(path, "premise", "hypothesis"), start=1):
        label = row.get("label")
        if isinstance(label, int) and 0 <= label < len(_NLI_LABELS):
            label = _NLI_LABELS[label]
        if label not in _NLI_LABELS:
            known = ", ".join(_NLI_LABELS)
            raise ValueError(f"{path}, row {number}: the label is {label!r}, not one of {known}.")
        found.append(Row(_texts(row), (str(label),), group=str(row.get("language", ""))))
    return found


def summarization_rows(path: Path) -> list[Row]:
    """Return rows with `article` and `highlights`.

    Raises:
        ValueError: a row lacks a field.
    """
    return [
        Row({"article": row["article"].strip().replace(" n't", "n't")}, (row["highlights"],))
        for row in read_rows(path, "article", "highlights")
    ]


def squad_rows(path: Path) -> list[Row]:
    """Return rows with `context`, `question` and all answers, from JSON Lines or official JSON.

    Raises:
        ValueError: a row lacks a field or has no answer.
    """
    whole = _whole_file(path)
    try:
        rows = _official_squad(whole) if "data" in whole else read_rows(path, "context", "question")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of SQuAD's form ({error!r}).") from error
    found = []
    for number, row in enumerate(rows, start=1):
        answers = row.get("answers", [])
        if isinstance(answers, dict):  # as the library `datasets` writes them
            answers = answers.get("text")
        if not isinstance(answers, list) or not all(isinstance(each, str) for each in answers):
            raise ValueError(f"{path}, row {number}: answers is {answers!r}, not a list of texts.")
        if not answers:
            raise ValueError(f"{path}, row {number}: no answers.")
        found.append(Row(_texts(row), tuple(dict.fromkeys(answers))))
    return found


def _whole_file(path: Path) -> Mapping[str, Any]:
    """Return a file's one JSON object; an empty one where it is several lines of JSON."""
    text = _text_of(path)
    try:
        return json_object(text, path)
    except ValueError:
        return {}


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


def translation_rows(path: Path, target_path: str | None) -> list[Row]:
    """Return source and target lines; SentencePiece marks between their words are taken out.

    Without a target file the source is JSON Lines with `source` and `target`.

    Raises:
        ValueError: the files differ in length, or a row lacks a field.
    """
    if target_path is None:
        rows = read_rows(path, "source", "target")
        return [Row({"source": row["source"]}, (row["target"],)) for row in rows]
    sources, targets = _detokenised_lines(path), _detokenised_lines(Path(target_path))
    if len(sources) != len(targets) or not sources:
        raise ValueError(
            f"{path} has {len(sources)} lines and {target_path} has {len(targets)}; they must "
            "correspond line by line."
        )
    return [Row({"source": s}, (t,)) for s, t in zip(sources, targets, strict=True)]


def _detokenised_lines(path: Path) -> list[str]:
    lines = _text_of(path).split("\n")
    return [_detokenised(line) for line in (lines if lines[-1] else lines[:-1])]


def _detokenised(line: str) -> str:
    if _WORD_START not in line:
        return line.strip()
    return line.replace(" ", "").replace(_WORD_START, " ").strip()
