"""Text tasks through a real server, against the library that the models come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from export_scripts.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.evaluation.evaluator import evaluate
from inference.evaluation.options import EvaluationOptions, LatencyOptions, TextTaskOptions
from inference.evaluation.record import RunFacts, read_predictions
from inference.serving.server import TritonServer
from tests.integration.triton_process import new_server

pytestmark = pytest.mark.triton

START_LIMIT_S = 120
RECORDED = Path(__file__).with_name("recorded")
OUTPUT_LEN = 6
PREFIX = "translate English to German:"
END_ID = 1
SPECIAL = ("<pad>", "</s>", "<unk>")
PAIRS = (
    ("the cat sees a dog", "die Katze sieht eine Hund"),
    ("the old house is lost", "die alt Haus ist verloren"),
    ("a river and a house", "eine Fluss und eine Haus"),
    ("the dog has lost the river", "die Hund hat die Fluss verloren"),
)


VOCABULARY = (
    *SPECIAL,
    *dict.fromkeys(f"{PREFIX} {' '.join(map(' '.join, PAIRS))}".replace(":", " :").split()),
)


def options(output_dir: Path, server: TritonServer, task: str, **task_options) -> EvaluationOptions:
    return EvaluationOptions(
        output_dir=output_dir,
        data_dir=output_dir,
        url=server.grpc_url,
        tasks=(task,),
        text_tasks={task: TextTaskOptions(**task_options)},
        latency=LatencyOptions(enabled=False),
        concurrency=4,
    )


@pytest.fixture(scope="module")
def gpt_server(
    sample_repository: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with new_server(sample_repository(tp_size=1), tmp_path_factory.mktemp("log")) as server:
        server.start(timeout_s=START_LIMIT_S)
        yield server


def test_boolq_by_likelihood_equals_the_recorded_answers(
    gpt_server: TritonServer, tmp_path: Path
) -> None:
    asked = options(
        tmp_path,
        gpt_server,
        "boolq",
        data_path=RECORDED / "boolq.jsonl",
        method="log_likelihood",
        reference_path=RECORDED / "boolq_reference.json",
    )
    report = evaluate(asked, RunFacts(name="gpt_books_5m"))
    (compared,) = report.tasks[0].reference.metrics
    assert (compared.agreeing, compared.disagreeing) == (12, 0)


@pytest.fixture(scope="module")
def t5_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random T5 as its library saves it, with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("t5_source")
    torch.manual_seed(8)  # four different answers, one of them ended by the end token
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(VOCABULARY),
            d_model=24,
            d_kv=6,
            num_heads=4,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=2,
            initializer_factor=4.0,
            pad_token_id=0,
            eos_token_id=END_ID,
            decoder_start_token_id=0,
        )
    )
    model.save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END_ID)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5_server(t5_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("t5")
    weights = convert(
        ConversionRequest(
            checkpoint_path=t5_source,
            output_dir=root / "weights",
            tp_size=2,
            weight_data_type="fp32",
        )
    ).ft_dir
    model_dir = root / "repository" / "fastertransformer"
    shutil.copytree(weights, model_dir / "1" / weights.name)
    build_repository(
        RepositoryRequest(
            model_dir=model_dir, tp_size=2, pp_size=1, max_batch_size=8, data_type="fp32"
        )
    )
    with new_server(model_dir.parent, root) as server:
        server.start(timeout_s=START_LIMIT_S)
        yield server


def translated(source: Path) -> list[str]:
    """Return the library's greedy translations."""
    model = T5ForConditionalGeneration.from_pretrained(source).eval()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    answers = []
    for english, _ in PAIRS:
        ids = tokenizer.encode(f"{PREFIX} {english}").ids
        found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=OUTPUT_LEN)
        answer = [token for token in found[0, 1:].tolist() if token != END_ID]
        answers.append(tokenizer.decode(answer, skip_special_tokens=False))
    return answers


def test_translation_equals_the_library_s(
    t5_source: Path, t5_server: TritonServer, tmp_path: Path
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in PAIRS))
    asked = options(tmp_path, t5_server, "translation", data_path=data, output_len=OUTPUT_LEN)
    report = evaluate(asked, RunFacts(name="t5"))
    expected = translated(t5_source)
    predictions = read_predictions(tmp_path / "predictions.jsonl")
    assert len(set(expected)) > 1
    assert [each.answer for each in predictions] == expected
    (bleu,) = report.metrics
    assert bleu.value == pytest.approx(
        sacrebleu.corpus_bleu(expected, [[target for _, target in PAIRS]], force=True).score
    )
    assert report.tasks[0].requests.generated > 0


def test_the_source_checkpoint_is_asked_as_reference(
    t5_source: Path, t5_server: TritonServer, tmp_path: Path
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in PAIRS))
    asked = options(tmp_path, t5_server, "translation", data_path=data, output_len=OUTPUT_LEN)
    report = evaluate(
        replace(asked, reference="huggingface", source_path=t5_source, limit=3),
        RunFacts(name="t5"),
    )
    assert report.tasks[0].reference.source.startswith("transformers ")
    (compared,) = report.tasks[0].reference.metrics
    assert compared.difference == 0
    assert compared.largest_difference == 0


@pytest.mark.parametrize("served", ["gpt_server", "t5_server"])
def test_the_ensemble_passes_its_smoke_test(
    served: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    asked = options(tmp_path, request.getfixturevalue(served), "end_to_end")
    report = evaluate(asked, RunFacts(name="smoke"))
    assert {metric.name: metric.value for metric in report.metrics} == {
        "end_to_end_agreement": 1.0,
        "end_to_end_stop_words": 1.0,
        "end_to_end_bad_words": 1.0,
    }
