"""The task identity: what it compares, what it reports, and what it says when a model deviates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.evaluation.options import Bound, EvaluationOptions, IdentityOptions, LatencyOptions
from inference.evaluation.record import Report, RunFacts
from inference.evaluation.report.formatting import time_text
from inference.evaluation.run.checks import check_evaluation
from inference.evaluation.run.evaluator import evaluate
from tests.fake_model import FakeModel
from tests.tiny_transformers import write_model

ROUNDING = 1e-5  # of the largest value: fp32 on both sides, sums in another order


class ServedModel(FakeModel):
    """Answers as a server of the checkpoint would, its logits off by `error` for one token."""

    def __init__(self, source: Path, *, error: float = 0.0, token: int = 7) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        self.error, self.token = error, token
        self.sizes: list[int] = []

    def input_names(self) -> Sequence[str]:
        return ("input_ids", "input_lengths", "request_output_len", "runtime_top_k")

    def infer(self, tensors: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.sizes.append(len(tensors["input_ids"]))
        count = int(tensors["request_output_len"][0, 0])
        padded = tensors["input_ids"].shape[1] + count
        every: dict[str, list[Any]] = {name: [] for name in outputs}
        for row, (length,) in zip(tensors["input_ids"], tensors["input_lengths"], strict=True):
            ids, log_probs = row[:length].tolist(), []
            for _ in range(count):
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1]
                logits[self.token] += self.error
                ids.append(int(logits.argmax()))
                log_probs.append(float(logits.log_softmax(-1)[ids[-1]]))
            every["output_ids"].append([ids + [0] * (padded - len(ids))])
            every["sequence_length"].append([padded])
            every["output_log_probs"].append([log_probs])
        return {name: np.array(values) for name, values in every.items()}


class ServedBert(FakeModel):
    """Answers with hidden states, all of them `error` off."""

    def __init__(self, source: Path, *, error: float = 0.0) -> None:
        super().__init__()
        self.model = transformers.BertModel.from_pretrained(source).eval()
        self.error = error

    def input_names(self) -> Sequence[str]:
        return ("input_hidden_state", "sequence_lengths")

    def infer(self, tensors: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        states = torch.tensor(tensors["input_hidden_state"])
        assert tensors["sequence_lengths"].tolist() == [[states.shape[1]]]
        with torch.no_grad():
            hidden = self.model.encoder(states).last_hidden_state
        assert tuple(outputs) == ("output_hidden_state",)
        return {outputs[0]: (hidden + self.error).numpy()}


@pytest.fixture
def options(tmp_path: Path) -> EvaluationOptions:
    return EvaluationOptions(
        output_dir=str(tmp_path / "out"),
        data_dir=tmp_path,
        tasks=["identity"],
        source_path=write_model("gpt2", tmp_path / "source"),
        weights_dir=tmp_path / "ft dir" / "2-gpu",
        identity=IdentityOptions(samples=4, input_len=64, output_len=5),
        latency=LatencyOptions(enabled=False),
        concurrency=2,
    )


def run(options: EvaluationOptions, model: FakeModel) -> tuple[Report, dict[str, float]]:
    report = evaluate(replace(options, weights_dir=None), RunFacts(name="tiny"), model=model)
    return report, {metric.name: metric.value for metric in report.metrics}


def test_model_that_is_its_source_passes(options: EvaluationOptions) -> None:
    assert options.source_path is not None
    report, values = run(options, ServedModel(options.source_path))
    assert (report.gate.exit_code, len(report.gate.verdicts)) == (0, 1)
    assert values["identity_same_tokens"] == 1.0
    assert values["identity_relative_difference"] < ROUNDING
    (task,) = report.tasks
    # 40 positions hold rows of 35 at most and answers of 5.
    lengths = [len(each.split()) for each in _texts(options)]
    assert (task.dataset.count, max(lengths) <= 35) == (4, True)


def test_rows_of_a_request_are_all_compared(options: EvaluationOptions) -> None:
    assert options.source_path is not None
    identity = IdentityOptions(samples=5, batch_size=2, input_len=20, min_input_len=6, output_len=4)
    model = ServedModel(options.source_path)
    report, values = run(replace(options, identity=identity), model)
    assert sorted(model.sizes) == [1, 2, 2]
    assert values["identity_same_tokens"] == 1.0
    assert values["identity_relative_difference"] < ROUNDING
    lengths = [len(row.split()) for text in _texts(options) for row in text.split(";")]
    assert len(lengths) == 5
    assert min(lengths) >= 6
    assert max(lengths) <= 20
    text = time_text(report.tasks[0].requests)
    assert text.startswith("3 requests in ")
    assert text.endswith(" generated tokens/s") is False  # log probabilities were asked for


def test_rows_may_all_have_one_length(options: EvaluationOptions) -> None:
    assert options.source_path is not None
    identity = IdentityOptions(samples=3, batch_size=3, input_len=9, min_input_len=9, output_len=2)
    run(replace(options, identity=identity), ServedModel(options.source_path))
    assert [len(row.split()) for row in _texts(options)[0].split(";")] == [9, 9, 9]


def test_release_of_mesh_transformer_jax_is_computed_too(
    options: EvaluationOptions, shared: Path, tmp_path: Path
) -> None:
    """The model that answers is transformers' own, of a folder with the same weights."""
    given = (("head_num", "4"), ("rotary_embedding", "2"))
    source = shared / "golden/gptj_slim/tiny/source"
    kind = {"output_format": "huggingface", "given": given}
    request = ConversionRequest(source, tmp_path / "folder", 1, "fp32", **kind)  # type: ignore[arg-type]
    served = ServedModel(convert(request).ft_dir)
    report, values = run(replace(options, source_path=source, given=given), served)
    assert report.gate.exit_code == 0
    assert values["identity_same_tokens"] == 1.0


def _texts(options: EvaluationOptions) -> list[str]:
    from inference.evaluation.record import read_predictions

    return [each.text for each in read_predictions(Path(options.output_dir, "predictions.jsonl"))]


def test_one_wrong_logit_shows_in_log_probabilities_and_tokens(
    options: EvaluationOptions,
) -> None:
    assert options.source_path is not None
    report, values = run(options, ServedModel(options.source_path, error=100.0))
    assert report.gate.exit_code == 3
    # It always wins now, with a log probability of 0.
    assert values["identity_same_tokens"] < 1.0
    assert values["identity_max_difference"] >= values["identity_mean_difference"] > 0.1


def test_hidden_states_are_compared_in_their_own_unit(
    options: EvaluationOptions, tmp_path: Path
) -> None:
    source = write_model("bert", tmp_path / "bert")
    report, values = run(replace(options, source_path=source), ServedBert(source, error=0.25))
    assert values["identity_max_difference"] == pytest.approx(0.25, rel=1e-4)
    assert values["identity_mean_difference"] == pytest.approx(0.25, rel=1e-4)
    assert "identity_same_tokens" not in values
    assert report.gate.exit_code == 3


def test_breach_names_the_command_that_finds_the_tensor(options: EvaluationOptions) -> None:
    assert options.source_path is not None
    options.weights_dir.mkdir(parents=True)  # type: ignore[union-attr]
    model = ServedModel(options.source_path, error=100.0)
    report = evaluate(options, RunFacts(name="tiny"), model=model)
    (breach,) = report.gate.of("breached")
    assert str(breach).endswith(
        f"python -m inference.certify {options.source_path} '{options.weights_dir}'"
    )
    assert str(breach) in unescape(Path(options.output_dir, "junit.xml").read_text())


@pytest.mark.parametrize(
    ("types", "tolerance", "limit"),
    [(("fp32", "fp32"), None, 1e-4), (("fp16", "fp32"), None, 1e-2), (("fp16", "bf16"), None, 8e-2),
     (("fp16", "fp32", "int8"), None, 0.15), (("fp32", "fp32"), 0.5, 0.5)],
)  # fmt: skip
def test_tolerance_is_that_of_the_coarsest_type_unless_given(
    options: EvaluationOptions, types: tuple[str, ...], tolerance: float | None, limit: float
) -> None:
    assert options.source_path is not None
    identity = replace(options.identity, tolerance=tolerance)
    model = ServedModel(options.source_path)
    report, _ = run(replace(options, identity=identity, types=types), model)
    assert report.bounds == {"identity_relative_difference": Bound(max=limit)}


def test_bound_of_the_user_takes_the_place_of_the_tolerance(options: EvaluationOptions) -> None:
    assert options.source_path is not None
    gate = {"identity_relative_difference": {"max": 1e-12}}
    report, _ = run(replace(options, gate=gate), ServedModel(options.source_path, error=1e-3))
    assert report.gate.exit_code == 3
    assert "inference.certify" in str(report.gate.of("breached")[0])


def test_options_that_cannot_be_used_are_reported(
    options: EvaluationOptions, tmp_path: Path
) -> None:
    wrong = replace(
        options,
        source_path=tmp_path / "model.nemo",
        identity=IdentityOptions(input_len=5, min_input_len=6),
    )
    problems = "\n".join(check_evaluation(wrong))
    assert f"export.model.checkpoint_path={tmp_path / 'model.nemo'} is not there" in problems
    assert "evaluate.identity.min_input_len=6 exceeds evaluate.identity.input_len=5" in problems
