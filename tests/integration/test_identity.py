"""The task identity through one real server: every kind of model, and one that is damaged."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.certify.__main__ import main as certify
from inference.evaluation.options import EvaluationOptions, IdentityOptions, LatencyOptions
from inference.evaluation.record import Report, RunFacts
from inference.evaluation.run.evaluator import evaluate
from inference.server.kinds import SLIPWAY
from inference.server.server import ModelServer
from tests.integration.triton_process import hosted
from tests.tiny_transformers import write_model

# model -> (family, ranks, type)
MODELS = {
    "gpt2": ("gpt2", 2, "fp32"),
    "gpt2_int8": ("gpt2", 1, "fp32"),
    "t5": ("t5", 1, "fp32"),
    "t5_encoder": ("t5-encoder", 1, "fp32"),
    "bert": ("bert", 2, "fp32"),
    "bert_bf16": ("bert", 1, "bf16"),
    "damaged": ("gptj", 1, "fp32"),
}
# Exported with int8_mode=1.
INT8 = ("gpt2_int8",)
DAMAGED = "model.layers.1.mlp.dense_h_to_4h.bias.0.bin"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sources and a repository of all models."""
    root = tmp_path_factory.mktemp("identity")
    for name, (family, tp_size, kind) in MODELS.items():
        source = write_model(family, root / "sources" / name)
        model_dir = root / "repository" / name
        request = ConversionRequest(source, model_dir / "1", tp_size, weight_data_type=kind)
        weights = convert(request).ft_dir
        build_repository(
            RepositoryRequest(
                model_dir=model_dir,
                tp_size=tp_size,
                pp_size=1,
                max_batch_size=4,
                data_type=kind,
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


def evaluated(root: Path, server: ModelServer, name: str, tmp_path: Path) -> Report:
    _, tp_size, kind = MODELS[name]
    types = (kind, "int8") if name in INT8 else (kind,)
    weights = root / "repository" / name / "1" / f"{tp_size}-gpu"
    options = EvaluationOptions(
        output_dir=str(tmp_path / "out"),
        data_dir=tmp_path,
        tasks=["identity"],
        url=server.address("grpc"),
        model_name=name,
        ensemble_name=None,
        tokenizer_dir=weights,
        weights_dir=weights,
        source_path=root / "sources" / name,
        identity=IdentityOptions(samples=6, input_len=16, output_len=6),
        types=types,
        latency=LatencyOptions(
            shapes=["8+2"], batch_sizes=[1, 2], concurrencies=[1], requests=3, warmup=1
        ),
        concurrency=4,
    )
    return evaluate(options, RunFacts(name=name))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "damaged"])
def test_served_model_is_its_source(
    root: Path, server: ModelServer, name: str, tmp_path: Path
) -> None:
    report = evaluated(root, server, name, tmp_path)
    assert (report.gate.exit_code, len(report.gate.verdicts)) == (0, 1)
    values = {metric.name: metric.value for metric in report.metrics}
    if MODELS[name][2] == "fp32":
        is_exact = values["identity_relative_difference"] < 1e-5
        assert is_exact == (name not in INT8)
    assert 0 < values["identity_mean_difference"] <= values["identity_max_difference"]
    generates = MODELS[name][0] in ("gpt2", "t5")
    if name not in INT8:
        assert values.get("identity_same_tokens") == (1.0 if generates else None)
    points = [(each.batch_size, each.input_len, each.output_len) for each in report.latency]
    output_len = 2 if generates else 0
    assert points == [(1, 8, output_len), (2, 8, output_len)]
    assert all((each.first_token_ms is None) == (not generates) for each in report.latency)
    assert all(each.tokens_per_s > 0 for each in report.latency)


def test_damaged_shard_is_found_and_the_message_says_how_to_find_it(
    root: Path, server: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluated(root, server, "damaged", tmp_path)
    assert report.gate.exit_code == 3
    (breach,) = report.gate.of("breached")
    assert "identity_relative_difference" in str(breach)
    _, _, command = str(breach).partition("to find the layer and the tensor: ")
    # The command as it is printed.
    assert command in (tmp_path / "out" / "report.md").read_text()
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "inference.certify"]
    assert certify(words[3:]) == 1
    reported = capsys.readouterr().out
    assert "layer 1: first layer that differs" in reported
    assert f"{DAMAGED}: changed" in reported
