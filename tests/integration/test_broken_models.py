"""The bundled model's baseline catches the model broken in several ways, and not its rounding.

The table of docs/evaluation.md has the figures that this test prints with -s.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT, GateResult
from inference.evaluation.options import EvaluationOptions, LambadaOptions, LatencyOptions
from inference.evaluation.record import RunFacts
from inference.evaluation.run.evaluator import evaluate
from inference.ranks.settings import Placement
from tests.conftest import ROOT
from tests.engine_model import EngineModel

MODEL = ROOT / "examples" / "gpt_books_5m"
BASELINE = MODEL / "baseline.json"
RISE = "no rise of more than 0.25 % at 95 %"
GATE = {
    "lambada_token_perplexity": f"no change; {RISE}, advisory",
    "lambada_last_token": "no drop of more than 10 points at 95 %",
}
HEADS, HEAD_SIZE, HIDDEN = 8, 32, 256
PASSAGES = ROOT / "examples" / "passages.jsonl"
PASSAGE = json.loads(PASSAGES.read_text(encoding="utf-8").partition("\n")[0])["text"]


def zero_a_layer(folder: Path) -> None:
    change(folder, "model.layers.2.*.weight*.bin", np.zeros_like)


def add_noise(folder: Path) -> None:
    random = np.random.default_rng(0)
    for pattern in ("*.weight.*.bin", "model.w?e.bin"):
        change(folder, pattern, lambda w: w * random.normal(1, 0.05, w.shape).astype(w.dtype))


def swap_heads(folder: Path) -> None:
    """Exchange the queries of two heads of one layer."""

    def swapped(weight: np.ndarray) -> np.ndarray:
        split = weight.reshape(HIDDEN, 3, HEADS, HEAD_SIZE).copy()
        split[:, 0, [1, 5]] = split[:, 0, [5, 1]]
        return split.reshape(weight.shape)

    change(folder, "model.layers.1.attention.query_key_value.weight.0.bin", swapped)


def swap_words_of_the_tokenizer(folder: Path) -> None:
    path = folder / "vocab.json"
    vocab = json.loads(path.read_text(encoding="utf-8"))
    vocab["Ġand"], vocab["Ġthe"] = vocab["Ġthe"], vocab["Ġand"]
    path.write_text(json.dumps(vocab), encoding="utf-8")


def forget_merges_of_the_tokenizer(folder: Path) -> None:
    path = folder / "merges.txt"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")


def permute_one_matrix(folder: Path) -> None:
    change(
        folder,
        "model.layers.1.mlp.dense_4h_to_h.weight.0.bin",
        np.random.default_rng(0).permutation,
    )


def duplicate_a_layer(folder: Path) -> None:
    for path in folder.glob("model.layers.2.*"):
        shutil.copyfile(path, folder / path.name.replace("layers.2", "layers.3"))


def drop_the_last_norm(folder: Path) -> None:
    change(folder, "model.final_layernorm.weight.bin", np.ones_like)
    change(folder, "model.final_layernorm.bias.bin", np.zeros_like)


def stretch_the_positions(folder: Path) -> None:
    """As another base of rotary embeddings does: each position is read for one a tenth earlier."""

    def stretched(table: np.ndarray) -> np.ndarray:
        rows = table.reshape(-1, HIDDEN)
        return rows[np.arange(len(rows)) * 9 // 10].ravel()

    change(folder, "model.wpe.bin", stretched)


def exchange_the_halves_of_two_ranks(folder: Path) -> None:
    change(
        folder,
        "model.layers.1.mlp.dense_h_to_4h.weight.0.bin",
        lambda weight: weight.reshape(HIDDEN, 2, -1)[:, ::-1].ravel(),
    )


def round_to_bf16(folder: Path) -> None:
    """The weights of fp16, which the bundled checkpoint has, with the 8 bits of bf16."""

    def rounded(weight: np.ndarray) -> np.ndarray:
        bits = weight.astype(np.float16).astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)

    change(folder, "*.bin", rounded)


def round_to_fp16(folder: Path) -> None:
    change(folder, "*.bin", lambda weight: weight.astype(np.float16).astype(np.float32))


def add_a_bias_twice(folder: Path) -> None:
    change(folder, "model.layers.1.mlp.dense_4h_to_h.bias.bin", lambda bias: 2 * bias)


def leave(folder: Path) -> None:
    del folder


def change(folder: Path, pattern: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    found = sorted(folder.glob(pattern))
    assert found
    for path in found:
        function(np.fromfile(path, np.float32)).astype(np.float32).tofile(path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    request = ConversionRequest(
        checkpoint_path=MODEL / "gpt_books_5m.nemo",
        output_dir=tmp_path_factory.mktemp("shards"),
        tp_size=1,
        weight_data_type="fp32",
    )
    return convert(request).ft_dir


class SamplingModel(EngineModel):
    """Answers at the temperature 0.7."""

    def complete_ids(
        self, input_ids: Sequence[int], *, output_len: int, tensors: object = None
    ) -> tuple[int, ...]:
        assert tensors is None
        sampled = {
            "runtime_top_k": np.array([[0]], np.uint32),
            "runtime_top_p": np.array([[1.0]], np.float32),
            "temperature": np.array([[0.7]], np.float32),
            "random_seed": np.array([[len(input_ids)]], np.uint64),
        }
        return tuple(self._ask(input_ids, output_len, sampled).output_ids[0])


class TruncatingModel(EngineModel):
    """Loses a part of one passage of 64, whose tokens become less probable."""

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        is_lost = tuple(input_ids[:20]) == self.encode(PASSAGE)[:20]
        return super().context_log_prob(input_ids) * (1.3 if is_lost else 1.0)


class ForgettingModel(EngineModel):
    """Loses the first token of every prompt."""

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        return super().context_log_prob(input_ids[1:])


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (SamplingModel, EXIT_INSUFFICIENT),  # which no perplexity shows
        pytest.param(TruncatingModel, EXIT_GATE_BREACHED, marks=pytest.mark.long),
        pytest.param(  # the figure is better
            ForgettingModel, EXIT_GATE_BREACHED, marks=pytest.mark.long
        ),
    ],
)
def test_a_model_that_is_asked_wrongly_does_not_pass(kind, status, shards, tmp_path):
    gate = gate_of(shards, tmp_path / "out", kind)
    print(kind.__name__, *gate.verdicts, sep="\n    ")
    assert gate.exit_code == status


def gate_of(folder: Path, output_dir: Path, kind: type[EngineModel] = EngineModel) -> GateResult:
    options = EvaluationOptions(
        output_dir=output_dir,
        data_dir=output_dir,
        lambada=LambadaOptions(data_path=PASSAGES, metrics=[*GATE]),
        latency=LatencyOptions(enabled=False),
        concurrency=16,
        gate=GATE,
        baseline="compare",
        baseline_path=BASELINE,
    )
    placement = Placement(data_type="fp32", device="cpu")
    with Engine(folder, placement, options=EngineOptions(max_lanes=16)) as engine:
        return evaluate(options, RunFacts(name="broken"), model=kind(engine, folder)).gate


@pytest.mark.parametrize(
    "broken",
    [
        forget_merges_of_the_tokenizer,
        permute_one_matrix,
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (
                swap_heads,
                drop_the_last_norm,
                exchange_the_halves_of_two_ranks,
                zero_a_layer,
                add_noise,
                swap_words_of_the_tokenizer,
                duplicate_a_layer,
                stretch_the_positions,
            )
        ),
    ],
)
def test_a_broken_model_is_caught(broken, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "1-gpu")
    broken(folder)
    gate = gate_of(folder, tmp_path / "out")
    print(broken.__name__, *gate.verdicts, sep="\n    ")
    assert gate.exit_code == 3
    assert {"no change", RISE} <= {each.bound for each in gate.of("breached")}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (round_to_fp16, "held"),
        (round_to_bf16, "breached"),
        pytest.param(leave, "held", marks=pytest.mark.long),
        pytest.param(add_a_bias_twice, "breached", marks=pytest.mark.long),
    ],
)
def test_a_change_that_is_no_regression_is_seen(changed, found, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "1-gpu")
    changed(folder)
    gate = gate_of(folder, tmp_path / "out")
    print(changed.__name__, *gate.verdicts, sep="\n    ")
    statuses = {each.bound: each.status for each in gate.verdicts}
    assert (statuses["no change"], statuses[RISE]) == (found, "insufficient")
    assert gate.passed == (found == "held")
