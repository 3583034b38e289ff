"""Tasks whose answer is text: data, prompts, scores."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from export_scripts.families.layout.config import PromptTask
from inference.evaluation.options import EvaluationOptions, PromptOptions, TextTaskOptions
from inference.evaluation.run.preparation import prepare_task
from inference.evaluation.run.task_run import TaskRun, run_task
from inference.evaluation.task import Prediction, Sample
from inference.evaluation.tasks import TASKS
from inference.evaluation.tasks.datasets import squad_rows, translation_rows
from inference.evaluation.tasks.served_folder import virtual_tokens
from inference.evaluation.tasks.text_task import TEXT_TASKS, TextTask, TextTaskKind
from inference.evaluation.tasks.text_tasks import (
    corpus_bleu,
    equal,
    exact_match,
    rouge,
    token_f1,
)
from tests.conftest import material
from tests.fake_model import VIRTUAL_ID
from tests.ft_folders import write_gpt


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BOOLQ = (
    {
        "taskname": "boolq",
        "passage": "Ice floats. ",
        "question": "does ice sink",
        "answer": "false",
    },
    {
        "taskname": "boolq",
        "passage": "Iron sinks. ",
        "question": "does iron sink",
        "answer": "true",
    },
)


def make(
    kind: TextTaskKind | str,
    own: TextTaskOptions | None = None,
    data_dir: Path = Path(),
    weights_dir: Path | None = None,
) -> TextTask:
    kind = TEXT_TASKS[kind] if isinstance(kind, str) else kind
    options: dict[str, Any] = {kind.name: own or TextTaskOptions()}
    return TextTask(kind, EvaluationOptions(data_dir=data_dir, weights_dir=weights_dir, **options))


def run(name: str, model, *, weights_dir: Path | None = None, **options) -> TaskRun:
    task = make(name, TextTaskOptions(**options), weights_dir=weights_dir)
    return run_task(prepare_task(task), model, concurrency=2)


def values(found: TaskRun) -> dict[str, float]:
    return {metric.name: metric.value for metric in found.report.metrics}


def test_boolq_by_generation_compares_the_whole_answer(tmp_path, fake_model):
    model = fake_model(
        {"Ice floats. does ice sink": ("fal", "se"), "Iron sinks. does iron sink": ("tru", "er")}
    )
    found = run("boolq", model, data_path=lines(tmp_path / "boolq.jsonl", *BOOLQ), output_len=2)
    assert [each.answer for each in found.predictions] == ["false", "truer"]
    assert values(found) == {"boolq_accuracy": 0.5}


def test_boolq_by_likelihood_takes_the_more_probable_answer(tmp_path, fake_model):
    model = fake_model()
    model.log_probs = {
        "Ice floats. \nQuestion: does ice sink\nAnswer: yes": -9.0,
        "Ice floats. \nQuestion: does ice sink\nAnswer: no": -8.0,
        "Iron sinks. \nQuestion: does iron sink\nAnswer: yes": -8.5,
        "Iron sinks. \nQuestion: does iron sink\nAnswer: no": -8.0,
    }
    path = lines(tmp_path / "boolq.jsonl", *BOOLQ)
    found = run("boolq", model, data_path=path, method="log_likelihood")
    assert [each.answer for each in found.predictions] == ["false", "false"]
    assert values(found) == {"boolq_accuracy": 0.5}


def test_virtual_tokens_stand_ahead_of_the_prompt(tmp_path, fake_model):
    model = fake_model({"Ice floats. does ice sink": ("fal", "se")})
    model.complete_ids = Mock(wraps=model.complete_ids)
    tasks = tuple(PromptTask(task_name=name, prompt_length=2) for name in ("a", "b"))
    folder = write_gpt(tmp_path, tasks=tasks, prompt_learning_start_id=VIRTUAL_ID)
    prompt = PromptOptions(task_id=1, append_ids=[VIRTUAL_ID + 7])
    path = lines(tmp_path / "boolq.jsonl", BOOLQ[0])
    found = run("boolq", model, weights_dir=folder, data_path=path, prompt=prompt)
    (ids,) = model.complete_ids.call_args_list[0].args
    assert ids[:2] == (VIRTUAL_ID, VIRTUAL_ID + 1)
    assert ids[-1] == VIRTUAL_ID + 7
    assert model.tensors == [{"prompt_learning_task_name_ids": 1}]
    assert values(found) == {"boolq_accuracy": 1.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PromptOptions(), (range(53, 60), 1)),  # the table of the task's name
        (PromptOptions(task_id=0), (range(53, 57), 0)),
        (PromptOptions(from_model=False), (range(0), None)),
    ],
)
def test_length_and_ids_of_virtual_tokens_are_those_of_config_ini(tmp_path, given, expected):
    tasks = (
        PromptTask(task_name="sentiment", prompt_length=4),
        PromptTask(task_name="BoolQ", prompt_length=7),
    )
    folder = write_gpt(tmp_path, tasks=tasks, prompt_learning_start_id=53)
    assert virtual_tokens("boolq", given, folder) == expected


def test_a_table_that_the_model_lacks_is_refused(tmp_path):
    options = EvaluationOptions(
        output_dir=tmp_path,
        data_dir=tmp_path,
        weights_dir=write_gpt(tmp_path),
        boolq=TextTaskOptions(prompt=PromptOptions(task_id=2)),
    )
    with pytest.raises(ValueError, match=r"prompt\.task_id=2: .* has no such prompt table"):
        _ = TASKS["boolq"](options).needs


@pytest.mark.parametrize("name", sorted(TEXT_TASKS))
def test_data_that_is_missing_is_described(tmp_path, name):
    options = EvaluationOptions(output_dir=tmp_path, data_dir=tmp_path)
    (problem,) = TASKS[name](options).problems()
    assert problem.startswith(f"evaluate.{name}.data_path is needed for the task {name}. To get ")
    assert any(each in problem for each in (".jsonl", "sacrebleu -t", "dev-v1.1.json"))


def test_xnli_is_summed_up_by_language_too(tmp_path, fake_model):
    rows = [
        {"premise": "p", "hypothesis": str(n), "label": n % 3, "language": language}
        for n, language in enumerate(["de", "en", "en"])
    ]
    model = fake_model(
        {
            "xnli: premise: p hypothesis: 0": ("ent", "ail", "men", "t"),
            "xnli: premise: p hypothesis: 1": ("neu", "tra", "l"),
        }
    )
    path = lines(tmp_path / "xnli.jsonl", *rows)
    model.continuations["xnli: premise: p hypothesis: 1"] = ("neu", "tra", "l", " ")
    found = run("xnli", model, data_path=path, output_len=4)
    assert values(found) == {
        "xnli_accuracy": pytest.approx(2 / 3),
        "xnli_accuracy_de": 1.0,
        "xnli_accuracy_en": 0.5,
    }


def test_squad_takes_the_best_of_several_answers(tmp_path, fake_model):
    official = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": "c",
                        "qas": [
                            {
                                "question": "q",
                                "answers": [{"text": "the big red house"}, {"text": "The House!"}],
                            }
                        ],
                    }
                ]
            }
        ]
    }
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(official, indent=1))
    model = fake_model({"question: q context: c": (" ho", "use")})
    found = run("squad", model, data_path=path, output_len=2)
    assert values(found) == {"squad_exact_match": 1.0, "squad_f1": 1.0}
    lines_path = lines(
        tmp_path / "squad.jsonl", {"context": "c", "question": "q", "answers": ["a", "a", "b"]}
    )
    assert squad_rows(lines_path)[0].targets == ("a", "b")


def test_answers_as_the_datasets_library_writes_them(tmp_path):
    answers = {"text": ["a", "b"], "answer_start": [1, 4]}
    path = lines(tmp_path / "squad.jsonl", {"context": "c", "question": "q", "answers": answers})
    assert squad_rows(path)[0].targets == ("a", "b")


@pytest.mark.parametrize("answers", ["Paris", None, [1], {"text": "Paris"}])
def test_answers_that_are_no_list_of_texts_are_refused(tmp_path, answers):
    path = lines(tmp_path / "squad.jsonl", {"context": "c", "question": "q", "answers": answers})
    with pytest.raises(ValueError, match=r"row 1: answers is .*, not a list of texts"):
        squad_rows(path)


def test_json_that_only_begins_like_squad_is_refused(tmp_path):
    (tmp_path / "squad.json").write_text('{"data": [{"title": "t"}]}')
    with pytest.raises(ValueError, match=r"not of SQuAD's form \(KeyError\('paragraphs'\)\)"):
        squad_rows(tmp_path / "squad.json")


def test_translation_reads_two_files_and_removes_subword_marks(tmp_path, fake_model):
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("\u2581Good \u2581mor ning .\nPlain line\n")
    target.write_text("\u2581Guten \u2581Morgen .\nEinfache Zeile\n")
    model = fake_model({"translate English to German: Good morning.": tuple("Guten Morgen. "[:14])})
    found = run("translation", model, data_path=source, target_path=target, output_len=13)
    assert [each.target for each in found.predictions] == ["Guten Morgen.", "Einfache Zeile"]
    assert found.predictions[0].answer == "Guten Morgen."
    (metric,) = found.report.metrics
    assert 0 < metric.value < 100
    assert metric.scale == ""
    assert found.report.requests.generated == 2 * 13


def test_lines_of_other_editors_are_read(tmp_path):
    (tmp_path / "en").write_bytes(b"\xef\xbb\xbfa\r\n\r\nc")
    (tmp_path / "de").write_bytes(b"x\ny\x0b\nz\n")
    rows = translation_rows(tmp_path / "en", tmp_path / "de")
    assert [row.fields["source"] for row in rows] == ["a", "", "c"]
    (tmp_path / "en").write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 lines"):
        translation_rows(tmp_path / "en", tmp_path / "en")


def test_files_of_unequal_length_are_refused(tmp_path):
    (tmp_path / "en").write_text("a\nb\n")
    (tmp_path / "de").write_text("a\n")
    with pytest.raises(ValueError, match=r"has 2 lines and .* has 1"):
        translation_rows(tmp_path / "en", tmp_path / "de")


def test_summaries_are_scored_by_rouge(tmp_path, fake_model):
    row = {"article": "A cat sat. It did n't move.", "highlights": "A cat sat."}
    model = fake_model({"summarize: A cat sat. It didn't move.": ("A c", "at ", "sat", ".")})
    found = run("summarization", model, data_path=lines(tmp_path / "cnn.jsonl", row), output_len=4)
    assert values(found)["summarization_rouge1"] == 1.0


@pytest.mark.parametrize(
    ("name", "row", "reported"),
    [
        ("boolq", {"passage": "p"}, "line 1 has no text in field question; it has passage"),
        ("boolq", {"passage": "p", "question": "q", "answer": "maybe"}, "the answer is 'maybe'"),
        ("mnli", {"premise": "p", "hypothesis": "h", "label": 3}, "the answer is .3., not one of"),
        ("squad", {"context": "c", "question": "q"}, "row 1: no answers"),
        ("summarization", {"article": "a"}, "no text in field highlights"),
    ],
)
def test_rows_that_do_not_fit_are_reported(tmp_path, name, row, reported):
    task = make(name, TextTaskOptions(data_path=lines(tmp_path / "data", row)))
    with pytest.raises(ValueError, match=reported):
        task.prepare()


@pytest.mark.parametrize(
    ("name", "source", "target", "is_scored"),
    [
        ("summarization", "article", "Москва — столица.", False),
        ("summarization", "article", "Zürich ist größer.", True),
        ("translation", "source", "北京是首都", False),
        ("translation", "source", "Москва — столица.", True),
    ],
)
def test_references_that_a_metric_cannot_read_are_refused(
    tmp_path, name, source, target, is_scored
):
    field = {"summarization": "highlights", "translation": "target"}[name]
    path = lines(tmp_path / "rows.jsonl", {source: "A text.", field: target})
    task = make(name, TextTaskOptions(data_path=path))
    if is_scored:
        assert task.prepare()
    else:
        with pytest.raises(ValueError, match=f"script that the metric of {name}"):
            task.prepare()


def test_a_template_may_use_only_fields_of_the_data(tmp_path):
    options = TextTaskOptions(
        data_path=lines(tmp_path / "data", BOOLQ[0]), template="{passage} {title}"
    )
    with pytest.raises(ValueError, match="row 1: no field 'title' for the template"):
        make("boolq", options).prepare()


@pytest.mark.parametrize("template", ['{"text": "{passage}"}', "{0}", "{passage.text}", "{"])
def test_a_template_that_cannot_be_filled_in_is_reported_before_the_start(tmp_path, template):
    boolq = TextTaskOptions(data_path=lines(tmp_path / "data", BOOLQ[0]), template=template)
    options = EvaluationOptions(output_dir=tmp_path, data_dir=tmp_path, boolq=boolq)
    (problem,) = TASKS["boolq"](options).problems()
    assert problem.startswith("evaluate.boolq.template is not")


def test_shared_test_sets_have_the_known_sizes():
    data = material("data")
    boolq = TextTaskOptions(data_path=data / "boolq_test.jsonl")
    dataset, samples = make("boolq", boolq).prepare()
    assert dataset.total == 2770
    assert sum(sample.target == "true" for sample in samples) == 1719
    wmt = TextTaskOptions(
        data_path=data / "wmt" / "test.en",
        target_path=data / "wmt" / "test.de",
    )
    dataset, samples = make("translation", wmt).prepare()
    assert dataset.total == 3004
    assert samples[0].text.endswith(": 28-Year-Old Chef Found Dead at San Francisco Mall")


def test_exact_match_ignores_case_articles_and_punctuation():
    assert exact_match("the Eiffel tower.", ["Eiffel Tower"]) == 1.0
    assert exact_match("Eiffel Towers", ["Eiffel Tower"]) == 0.0
    assert equal(" true ", ["true"]) == 1.0
    assert equal("True", ["true"]) == 0.0


def test_f1_counts_shared_words():
    assert token_f1("big red house", ["the red house"]) == pytest.approx(0.8)
    assert token_f1("", ["house"]) == 0.0
    assert token_f1("the", ["a"]) == 1.0  # nothing is left of either


def test_bleu_of_equal_texts_is_100_and_repeatable():
    texts = ["the cat sat on the mat", "it was a cold evening in the old town"]
    found = [Prediction("translation", 0, "", text, text, {}, seconds=0.0) for text in texts]
    assert corpus_bleu(found).value == pytest.approx(100.0)
    other = ["the cat sat on a mat", "it was a warm evening in the old town"]
    unlike = [replace(each, target=text) for each, text in zip(found, other, strict=True)]
    bleu = corpus_bleu(unlike)
    assert bleu == corpus_bleu(unlike)
    assert 0 < bleu.low < bleu.value < bleu.high < 100


def test_rouge_is_the_library_s():
    # 4 of 5 words shared in order: precision = recall = 0.8.
    for kind in ("rouge1", "rougeL"):
        assert rouge(kind, "a b c d e", ["a b c d f"]) == pytest.approx(0.8)


def test_a_summary_is_cut_to_four_sentences():
    for kind in ("rouge1", "rougeLsum"):
        assert rouge(kind, "One. Two. Three. Four. Five.", ["one two three four"]) == 1.0
        assert rouge(kind, "One", ["one"]) == 1.0


def test_all_right_answers_count():
    assert Sample(0, "q", "a", targets=("a", "b")).all_targets == ("a", "b")
    assert Sample(0, "q", "a").all_targets == ("a",)


def test_ids_after_a_prompt_need_no_virtual_tokens(tmp_path, fake_model):
    model = fake_model({"Ice floats. does ice sink": ("fal", "se")})
    model.complete_ids = Mock(wraps=model.complete_ids)
    prompt = PromptOptions(append_ids=[VIRTUAL_ID + 7])
    found = run("boolq", model, data_path=lines(tmp_path / "boolq.jsonl", BOOLQ[0]), prompt=prompt)
    (ids,) = model.complete_ids.call_args_list[0].args
    assert ids == (*model.encode("Ice floats. does ice sink"), VIRTUAL_ID + 7)
    assert model.tensors == [{}]
    assert values(found) == {"boolq_accuracy": 1.0}
