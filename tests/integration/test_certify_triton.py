"""A Triton server against the source: every kind of model, and one that is damaged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.certify.__main__ import main as certify
from inference.evaluation.options import EvaluationOptions, LatencyOptions
from inference.evaluation.record import RunFacts
from inference.evaluation.run.evaluator import evaluate
from inference.server.kinds import SLIPWAY
from inference.server.server import ModelServer
from tests.integration.triton_process import hosted
from tests.tiny_transformers import write_model

# model -> (family, ranks)
MODELS = {
    "gpt2": ("gpt2", 2),
    "gpt2_int8": ("gpt2", 1),
    "t5": ("t5", 1),
    "t5_encoder": ("t5-encoder", 1),
    "bert": ("bert", 2),
    "damaged": ("gptj", 1),
}
# Exported with int8_mode=1.
INT8 = ("gpt2_int8",)
DAMAGED = "model.layers.1.mlp.dense_h_to_4h.bias.0.bin"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sources and a repository of all models."""
    root = tmp_path_factory.mktemp("served")
    for name, (family, tp_size) in MODELS.items():
        source = write_model(family, root / "sources" / name)
        model_dir = root / "repository" / name
        request = ConversionRequest(source, model_dir / "1", tp_size, weight_data_type="fp32")
        weights = convert(request).ft_dir
        build_repository(
            RepositoryRequest(
                model_dir=model_dir,
                tp_size=tp_size,
                pp_size=1,
                max_batch_size=4,
                data_type="fp32",
                int8_mode=int(name in INT8),
                ensemble=False,
            )
        )
        if name == "damaged":  # after the export, which would refuse it
            values = np.fromfile(weights / DAMAGED, np.float32)
            (values + 1).tofile(weights / DAMAGED)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ModelServer]:
    with hosted(SLIPWAY, root / "repository", root / "log") as running:
        running.start(timeout_s=240)
        yield running


def asked(
    root: Path, server: ModelServer, name: str, tmp_path: Path, *words: str
) -> tuple[int, dict[str, Any]]:
    """Certify a served model; return the status, and the part of what the server answered."""
    status = certify([
        str(root / "sources" / name), *words, "--endpoint", server.address("grpc"),
        "--protocol", "grpc", "--model", name, "--samples", "6", "--input-len", "16",
        "--output-len", "6", "--batch-sizes", "1,4", "--output", str(tmp_path),
    ])  # fmt: skip
    parts = json.loads((tmp_path / "certificate.json").read_text())["parts"]
    return status, next(each for each in parts if each["name"] == "served")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "damaged"])
def test_served_model_is_its_source(root, server, name, tmp_path):
    status, served = asked(root, server, name, tmp_path)
    assert (status, [row["batch_size"] for row in served["rows"]]) == (0, [1, 4])
    for row in served["rows"]:
        assert (row["relative"] < 1e-5) == (name not in INT8)
        assert row["relative"] > 0
        if name not in INT8:
            assert row["same_tokens"] == 1


def test_damaged_shard_is_found_in_its_answers_and_by_its_tensor(root, server, tmp_path, capsys):
    folder = root / "repository" / "damaged" / "1" / "1-gpu"
    status, served = asked(root, server, "damaged", tmp_path, str(folder))
    assert (status, len(served["findings"])) == (1, 2)
    assert served["findings"][1]["where"] == "batch size 4, row 0"
    reported = capsys.readouterr().out
    assert "layer 1: first layer that differs" in reported
    assert f"{DAMAGED}: changed" in reported


def test_a_server_that_is_not_there_is_not_called_equal(root, server, tmp_path):
    source = str(root / "sources" / "gpt2")
    words = ["--protocol", "grpc", "--endpoint", "127.0.0.1:9", "--output", str(tmp_path)]
    assert certify([source, *words]) == 3
    words[3] = server.address("grpc")  # which has no model of the name that most have
    assert certify([source, *words]) == 3


@pytest.mark.parametrize("name", ["gpt2", "t5_encoder", "bert"])
def test_latency_needs_no_task(root, server, name, tmp_path):
    _, tp_size = MODELS[name]
    weights = root / "repository" / name / "1" / f"{tp_size}-gpu"
    options = EvaluationOptions(
        output_dir=tmp_path / "out",
        data_dir=tmp_path,
        tasks=[],
        url=server.address("grpc"),
        model_name=name,
        ensemble_name=None,
        tokenizer_dir=weights,
        weights_dir=weights,
        source_path=root / "sources" / name,
        latency=LatencyOptions(
            shapes=["8+2"], batch_sizes=[1, 2], concurrencies=[1], requests=3, warmup=1
        ),
    )
    report = evaluate(options, RunFacts(name=name))
    output_len = 2 if name == "gpt2" else 0
    points = [(each.batch_size, each.input_len, each.output_len) for each in report.latency]
    assert points == [(1, 8, output_len), (2, 8, output_len)]
    assert all((each.first_token_ms is None) == (not output_len) for each in report.latency)
    assert all(each.tokens_per_s > 0 for each in report.latency)
