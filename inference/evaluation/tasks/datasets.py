"""Read data sets strictly, row by row, and choose samples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from foundations.errors import listed
from foundations.files.checksum import sha256_of
from foundations.files.json_content import Table, json_object
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Dataset, DatasetSamples, Sample

_WORD_START = "\u2581"  # SentencePiece's mark before a word


def choose_samples(
    samples: Sequence[Sample], options: EvaluationOptions, *, name: str, path: str, sha256: str
) -> DatasetSamples:
    """Choose `options.limit` samples at random, in file order; all without a limit.

    `name`, `path` and `sha256` describe the data set.
    """
    total, limit, seed = len(samples), options.limit, options.seed
    if limit is None or limit >= total:
        return Dataset(name, path, sha256, total, total), samples
    chosen = sorted(random.Random(seed).sample(range(total), limit))
    return Dataset(name, path, sha256, total, limit, limit, seed), [samples[i] for i in chosen]


def choose_from_file(
    samples: Sequence[Sample], options: EvaluationOptions, path: Path
) -> DatasetSamples:
    """Choose from the samples of a file, as `choose_samples` does."""
    return choose_samples(samples, options, name=path.name, path=str(path), sha256=sha256_of(path))


def missing_files(task: str, options: object, *keys: str) -> list[str]:
    """Return a problem for each of a task's options `keys` that names a missing file."""
    return [
        f"evaluate.{task}.{key}={path} is not a file; name an existing file, or null."
        for key in keys
        if (path := attrgetter(key)(options)) is not None and not path.is_file()
    ]


@dataclass(frozen=True)
class Row:
    """One row: fields by name, correct answers, and its group of the data."""

    fields: Mapping[str, str]
    targets: tuple[str, ...]
    group: str = ""


def read_rows(path: Path, *texts: str) -> list[Table]:
    """Read the objects of a JSON Lines file, each with non-blank text fields `texts`.

    Raises:
        ValueError: lines are not such objects (the first ones are named), or the file is empty.
    """
    rows: list[Table] = []
    problems = []
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
        shown = "\n".join([f"{path} is not a data set of this form:", *listed(problems, "  ")])
        raise ValueError(shown)
    if not rows:
        raise ValueError(f"{path} holds no samples; expected one JSON object on each line.")
    return rows


def _text_of(path: Path) -> str:
    """Read a text file, without the byte order mark that some editors write.

    Only line feeds end its lines, because a JSON string may contain U+2028.

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
    """Read rows with the fields `texts`, an answer of `labels`, and the group `language`.

    The answer is the field `answer` (NeMo's prompt-learning files) or `label` (SuperGLUE), as a
    value or a key of `labels`.

    Raises:
        ValueError: a row lacks a field or has another answer.
    """
    found = []
    for number, row in enumerate(read_rows(path, *texts), start=1):
        label = str(row.get("answer", row.get("label", ""))).lower()
        answer = labels.get(label, label)
        if answer not in labels.values():
            known = ", ".join(labels.values())
            raise ValueError(f"{path}, row {number}: the answer is {label!r}, not one of {known}.")
        found.append(Row(_texts(row), (answer,), group=str(row.get("language", ""))))
    return found


def squad_rows(path: Path) -> list[Row]:
    """Read rows with `context`, `question` and all answers, from JSON Lines or the official JSON.

    Raises:
        ValueError: a row lacks a field or has no answer.
    """
    try:
        table = json_object(_text_of(path), path)
    except ValueError:  # JSON Lines, or content that read_rows refuses
        table = {}
    try:
        rows = _official_squad(table) if "data" in table else read_rows(path, "context", "question")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of SQuAD's form ({error!r}).") from error
    found = []
    for number, row in enumerate(rows, start=1):
        answers = row.get("answers", [])
        if isinstance(answers, dict):  # written by the library `datasets`
            answers = answers.get("text")
        if not isinstance(answers, list) or not all(isinstance(each, str) for each in answers):
            raise ValueError(f"{path}, row {number}: answers is {answers!r}, not a list of texts.")
        if not answers:
            raise ValueError(f"{path}, row {number}: no answers.")
        found.append(Row(_texts(row), tuple(dict.fromkeys(answers))))
    return found


def _official_squad(table: Table) -> list[Table]:
    return [
        {
            "context": paragraph["context"],
            "question": question["question"],
            "answers": [answer["text"] for answer in question["answers"]],
        }
        for article in table["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def translation_rows(path: Path, target_path: Path | None) -> list[Row]:
    """Read pairs of source and target lines, without SentencePiece's marks.

    Without a target file, `path` is JSON Lines with `source` and `target`.

    Raises:
        ValueError: the files differ in length, or a row lacks a field.
    """
    if target_path is None:
        rows = read_rows(path, "source", "target")
        return [Row({"source": row["source"]}, (row["target"],)) for row in rows]
    sources, targets = _detokenised_lines(path), _detokenised_lines(target_path)
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
