"""Data sets: read strictly row by row, and drawn from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from foundations.files.checksum import sha256_of
from foundations.files.json_content import Table, json_object
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Dataset, Drawn, Sample

_WORD_START = "\u2581"  # the mark that SentencePiece puts before a word
_MOST_SHOWN = 10


def drawn(
    samples: Sequence[Sample], options: EvaluationOptions, *, name: str, path: str, sha256: str
) -> Drawn:
    """Return the samples to ask and what they are drawn from: `options.limit` of all, in order.

    `name`, `path` and `sha256` are those of the data set.
    """
    total, limit, seed = len(samples), options.limit, options.seed
    if limit is None or limit >= total:
        return Dataset(name, path, sha256, total, total), samples
    chosen = sorted(random.Random(seed).sample(range(total), limit))
    return Dataset(name, path, sha256, total, limit, limit, seed), [samples[i] for i in chosen]


def drawn_from_file(samples: Sequence[Sample], options: EvaluationOptions, path: Path) -> Drawn:
    """Return what `drawn` does of the samples that a file holds."""
    return drawn(samples, options, name=path.name, path=str(path), sha256=sha256_of(path))


def missing_files(task: str, own: object, *keys: str) -> list[str]:
    """Return a problem for each of these options of a task that names a file there is not."""
    return [
        f"evaluate.{task}.{key}={path} is not a file; give an existing file, or null."
        for key in keys
        if (path := attrgetter(key)(own)) is not None and not Path(path).is_file()
    ]


@dataclass(frozen=True)
class Row:
    """One row: fields by name, right answers, and the part of the data it belongs to."""

    fields: Mapping[str, str]
    targets: tuple[str, ...]
    group: str = ""


def read_rows(path: Path, *texts: str) -> list[Table]:
    """Return the objects of a JSON Lines file, each with the fields `texts`, which are not blank.

    Raises:
        ValueError: lines that are not such an object (the first are named), or an empty file.
    """
    rows: list[Table] = []
    problems: list[str] = []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json_object(line, f"line {number}")
        except ValueError as error:
            problems.append(str(error))
            continue
        values = {name: row.get(name) for name in texts}
        missing = [name for name, v in values.items() if not (isinstance(v, str) and v.strip())]
        if missing:
            problems.append(
                f"line {number} has no text in field {', '.join(missing)}; it has "
                f"{', '.join(row) or 'nothing'}"
            )
        rows.append(row)
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


def _texts(row: Table) -> dict[str, str]:
    return {name: value for name, value in row.items() if isinstance(value, str)}


def labelled_rows(path: Path, *texts: str, labels: Mapping[str, str]) -> list[Row]:
    """Return rows with the fields `texts` and an answer of `labels`; `language` groups.

    The answer is `answer` (as NeMo's prompt-learning files have it) or `label` (SuperGLUE), by name
    or as a key of `labels`.

    Raises:
        ValueError: a row lacks a field or has another answer.
    """
    found = []
    for number, row in enumerate(read_rows(path, *texts), start=1):
        given = str(row.get("answer", row.get("label", ""))).lower()
        answer = labels.get(given, given)
        if answer not in labels.values():
            known = ", ".join(labels.values())
            raise ValueError(f"{path}, row {number}: the answer is {given!r}, not one of {known}.")
        found.append(Row(_texts(row), (answer,), group=str(row.get("language", ""))))
    return found


def squad_rows(path: Path) -> list[Row]:
    """Return rows with `context`, `question` and all answers, from JSON Lines or official JSON.

    Raises:
        ValueError: a row lacks a field or has no answer.
    """
    try:
        whole = json_object(_text_of(path), path)
    except ValueError:  # several lines of JSON, or what read_rows refuses
        whole = {}
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


def _official_squad(whole: Table) -> list[Table]:
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
    return [
        (line.replace(" ", "").replace(_WORD_START, " ") if _WORD_START in line else line).strip()
        for line in (lines if lines[-1] else lines[:-1])
    ]
