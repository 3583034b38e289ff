"""Every kind of model behind one server, against recorded tokens and hidden states."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.backend.tokenizer import load_tokenizer
from inference.client import main
from inference.server.server import ModelServer
from tests.conftest import ROOT
from tests.contract import tensors_of
from tests.ft_folders import unpack_case
from tests.integration.triton_process import hosted
from tests.tiny_t5 import TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3

TUNED = "t5_ia3"
# name of the model -> golden case, ranks, further settings
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gptneox": ("gptneox/parallel_residual", 2, {"max_queue_delay_us": 500}),
    "t5": ("t5_nemo/train_tp2_pp1_relative_geglu_nobias", 1, {"ensemble": True}),
    "t5_as_encoder": (
        "t5_nemo/train_tp2_pp1_relative_geglu_nobias",
        1,
        {"model_type": "T5-Encoder", "ensemble": True},
    ),
    "bert": ("bert/tiny", 1, {"data_type": "bf16"}),
}


@pytest.fixture(scope="module")
def repository(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, (case, tp_size, options) in MODELS.items():
        weights = unpack_case(
            shared / "golden" / case, tmp_path_factory.mktemp("ft"), tp_size=tp_size
        )
        model_dir = root / name
        shutil.copytree(weights, model_dir / "1" / weights.name)
        settings = {"ensemble": False, "max_batch_size": 4, "data_type": "fp32", **options}
        build_repository(
            RepositoryRequest(model_dir=model_dir, tp_size=tp_size, pp_size=1, **settings)
        )
    _add_t5_with_ia3(root / TUNED, tmp_path_factory.mktemp("tuned"))
    return root


def _add_t5_with_ia3(model_dir: Path, work_dir: Path) -> None:
    """Write a T5 with the vocabulary of the real ones, to which two IA3 tasks were added."""
    sizes = TinyT5(vocab_size=32128, relative=True)
    source = write_t5(work_dir / "t5.nemo", t5_tensors(sizes), sizes)
    tasks = tuple(
        write_ia3(work_dir / f"{seed}.nemo", ia3_scalers(sizes, seed=seed), sizes)
        for seed in (1, 2)
    )
    convert(ConversionRequest(source, model_dir / "1", 1, "fp32", ia3_checkpoints=tasks))
    build_repository(
        RepositoryRequest(
            model_dir=model_dir,
            tp_size=1,
            pp_size=1,
            max_batch_size=4,
            data_type="fp32",
            ensemble=False,
        )
    )


@pytest.fixture(scope="module")
def server(
    usual_host: str, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    with hosted(usual_host, repository, tmp_path_factory.mktemp("log")) as running:
        running.start(timeout_s=240)
        yield running


def _recorded(shared: Path, name: str) -> Any:
    return json.loads((shared / "golden" / MODELS[name][0] / "greedy.json").read_text())


def _column(*values: int) -> np.ndarray[Any, Any]:
    return np.array([[value] for value in values], np.uint32)


def _sure(recorded: Any) -> list[int]:
    """Return the recorded tokens before the first whose lead over the next is too small."""
    margins = recorded["top1_minus_top2"]
    count = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
    assert count >= 4
    tokens: list[int] = recorded["continuation"][:count]
    return tokens


def test_generated_tokens_equal_the_recorded_ones(shared, client):
    name = "gptneox"
    recorded = _recorded(shared, name)
    prompt, expected = recorded["prompt"], _sure(recorded)
    outputs = client.infer(
        name,
        tensors_of([prompt], len(expected)),
    )
    assert outputs["output_ids"][0, 0].tolist() == prompt + expected


def test_encoder_decoder_gives_the_recorded_tokens_alone_and_as_text(shared, client, repository):
    recorded = _recorded(shared, "t5")
    prompt, expected = recorded["prompt"], _sure(recorded)
    outputs = client.infer(
        "t5",
        tensors_of([prompt], len(expected), model="T5"),
    )
    assert outputs["output_ids"].dtype == np.int32
    assert outputs["output_ids"][0, 0].tolist() == expected
    assert outputs["sequence_length"].tolist() == [[len(expected)]]


def test_request_files_of_t5_are_answered_with_and_without_an_ia3_task(server, capsys):
    params = json.dumps({"config": {"url": server.address("http"), "model_name": TUNED}})
    answers = []
    for name in ("sample_request_single_t5.json", "sample_request_single_t5_ia3.json"):
        file = ROOT / "examples" / "requests" / name
        assert main(["request", str(file), "--params", params]) == 0
        answers.append(capsys.readouterr().out)
        assert "output_ids:" in answers[-1]
    assert answers[0] != answers[1]


def test_encoder_decoder_ensemble_answers_text_with_text(client, repository):
    tokenizer = load_tokenizer(repository / "preprocessing" / "1")
    text = tokenizer.decode(list(range(20, 26)))
    ids = client.encode([text])[0]
    assert ids[:-1] == tokenizer.encode(text)  # then the end token
    outputs = client.infer(
        "t5",
        tensors_of([ids], 5, model="T5"),
    )
    answer = outputs["output_ids"][0, 0, : outputs["sequence_length"][0, 0]].tolist()
    end_id = ids[-1]
    expected = tokenizer.decode([token for token in answer if token != end_id])
    assert client.generate_text([text], output_len=5) == [[expected]]


def test_t5_encoder_gives_the_recorded_hidden_states(shared, client):
    case = shared / "golden" / MODELS["t5_as_encoder"][0]
    prompt = _recorded(shared, "t5_as_encoder")["prompt"]
    expected = np.load(case / "encoder_hidden.npy")  # (S, E)
    request = tensors_of([prompt, prompt[:4]], model="T5-Encoder")
    outputs = client.infer("t5_as_encoder", request)
    hidden = outputs["output_hidden_state"]
    # fp32 on both sides; what remains is the order of sums.
    np.testing.assert_allclose(hidden[0], expected, atol=1e-3)
    assert "output_attentions" not in outputs
    asked = client.infer(
        "t5_as_encoder", request | {"is_return_attentions": np.array([[False], [True]])}
    )
    weights = asked["output_attentions"]  # (B, L, heads, S, S)
    assert weights.shape[0] == 2
    assert weights.shape[3:] == (len(prompt), len(prompt))
    # Each true position's weights are a distribution over the row's true positions.
    np.testing.assert_allclose(weights[0].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(weights[1, :, :, :4, :4].sum(-1), 1, atol=1e-5)


def test_tokenizer_of_an_encoder_gives_the_ids_of_the_whole_model(client, repository):
    text = load_tokenizer(repository / "tokenizer" / "1").decode(list(range(20, 26)))
    assert client.encode([text], model="tokenizer") == client.encode([text])


def test_text_encoder_gives_the_hidden_states_of_its_tokens(client):
    texts = ["a few words", "more words than before, and some"]
    query = np.array([[text.encode()] for text in texts], object)
    outputs = client.infer("text_encoder", {"query": query})
    ids = client.encode(texts, model="tokenizer")
    assert outputs["request_input_len"][:, 0].tolist() == [len(row) for row in ids]
    for row, tokens in enumerate(ids):
        alone = client.infer("t5_as_encoder", tensors_of([tokens], model="T5-Encoder"))
        np.testing.assert_allclose(
            outputs["output_hidden_state"][row, : len(tokens)],
            alone["output_hidden_state"][0],
            atol=1e-4,
        )
    asked = client.infer(
        "text_encoder", {"query": query[:1], "is_return_attentions": np.array([[True]])}
    )
    assert asked["output_attentions"].shape[0] == 1


def test_bert_in_bf16_gives_about_the_recorded_hidden_states(shared, client):
    case = shared / "golden" / MODELS["bert"][0]
    states = np.load(case / "input_hidden_state.npy").astype(np.float32)[None]  # (1, S, E)
    expected = np.load(case / "output_hidden_state.npy")
    lengths = np.array([[states.shape[1]]], np.int32)
    request = {"input_hidden_state": states, "sequence_lengths": lengths}
    outputs = client.infer("bert", request)
    # bf16 keeps 8 bits: values of order 1 after two layers are good to a few hundredths.
    np.testing.assert_allclose(outputs["output_hidden_state"][0], expected, atol=0.1)
