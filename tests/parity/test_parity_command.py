"""The parity command passes sound folders of every family and names what is wrong with others."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.parity.__main__ import main
from inference.parity.comparison import ParityReport, compare
from tests.ft_folders import unpack_case
from tests.tiny import write_nemo
from tests.tiny_megatron_core import core_state, write_core
from tests.tiny_transformers import MODELS, write_model


def write_pair(name: str, folder: Path, **fields: object) -> tuple[Path, Path]:
    """Return a source and its folder for two ranks."""
    source = write_model(name, folder / "source")
    return source, convert_to(source, folder, **fields)


def convert_to(source: Path, folder: Path, **fields: object) -> Path:
    values = {"tp_size": 2, "weight_data_type": "fp32", **fields}
    return convert(ConversionRequest(source, folder / "ft", **values)).ft_dir  # type: ignore[arg-type]


def damage(file: Path, place: int = 0) -> None:
    """Change one value of an fp32 file, as a bad disk or copy would."""
    values = np.fromfile(file, np.float32)
    values[place] += 3
    values.tofile(file)


def found(source: Path, ft_dir: Path, **fields: object) -> ParityReport:
    return compare(source, ft_dir, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_every_family_equals_its_source_at_every_place(name: str, tmp_path: Path) -> None:
    report = found(*write_pair(name, tmp_path))
    assert report.equal, report.to_json()
    # Two orders of magnitude below the tolerance: both compute in fp32.
    assert max(each.relative for each in report.activations) < 1e-5
    parts = {(each.place.where, each.place.part) for each in report.activations}
    stacks = {"t5": ["encoder ", "decoder "], "mt5": ["encoder ", "decoder "]}
    stacks["t5-encoder"] = ["encoder "]
    for stack in stacks.get(name, [""]):
        assert (f"{stack}embedding", "output") in parts
        for part in ("attention", "mlp", "output"):
            assert (f"{stack}layer 1", part) in parts
    assert ("decoder layer 2", "cross attention") in parts or not name.endswith("t5")


def test_release_of_mesh_transformer_jax_equals_transformers(shared: Path, tmp_path: Path) -> None:
    source = shared / "golden/gptj_slim/tiny/source"
    given = (("head_num", "4"), ("rotary_embedding", "2"))
    report = found(source, convert_to(source, tmp_path, given=given), given=given)
    assert report.equal, report.to_json()
    assert max(each.relative for each in report.activations) < 1e-5
    assert "GPTJForCausalLM of the JAX release" in report.source


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "t5", "bert"])
def test_rounding_of_a_type_is_within_its_tolerance(name: str, kind: str, tmp_path: Path) -> None:
    source, ft_dir = write_pair(name, tmp_path, weight_data_type=kind)
    report = found(source, ft_dir, data_type=kind)
    assert report.equal, report.to_json()
    # It does round: the tolerance of fp32 would not hold.
    assert not found(source, ft_dir, data_type=kind, tolerance=1e-4).equal


LAYER = "model.layers.1."

# family, damaged file, value -> first deviating place
DAMAGES = {
    "qkv bias of one rank": (
        "gpt2", LAYER + "attention.query_key_value.bias.1.bin", 30, "layer 1, attention"
    ),
    "row-parallel weight of one rank": (
        "gpt2", LAYER + "attention.dense.weight.1.bin", 5, "layer 1, attention"
    ),
    "output bias, which no rank shares": (
        "gpt2", LAYER + "mlp.dense_4h_to_h.bias.bin", 7, "layer 1, mlp"
    ),
    "layernorm": ("gpt2", LAYER + "post_attention_layernorm.weight.bin", 3, "layer 1, mlp"),
    "embedding": ("gpt2", "model.wte.bin", 5 * 24, "embedding"),
    "final norm": ("gpt2", "model.final_layernorm.bias.bin", 0, "final norm"),
    "head": ("llama", "model.lm_head.weight.bin", 0, "logits"),
    "summed biases of a parallel layer": (
        "gptneox-parallel", LAYER + "mlp.attention.bias.sum.bin", 4, "layer 1, mlp"
    ),
    "cross-attention of one rank": (
        "t5", "decoder.block.2.layer.1.EncDecAttention.v.weight.1.bin", 2,
        "decoder layer 2, cross attention",
    ),
    "encoder's position bias": (
        "t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight.0.bin", 1,
        "encoder layer 0, attention",
    ),
    "norm of BERT": (
        "bert", "model.encoder.layer.0.output.LayerNorm.weight.bin", 1, "layer 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGES)
def test_damaged_file_is_named_with_the_first_layer_that_deviates(
    damaged: str, tmp_path: Path
) -> None:
    family, name, value, place = DAMAGES[damaged]
    source, ft_dir = write_pair(family, tmp_path)
    damage(ft_dir / name, value)
    report = found(source, ft_dir)
    assert not report.equal
    assert [each.file for each in report.weights.differences] == [name]
    (difference,) = report.weights.differences
    assert difference.differing == 1
    assert difference.max_abs == pytest.approx(3)
    assert report.first_place is not None
    assert str(report.first_place.place) == place
    # The layers before are right to the last digits.
    before = report.activations[: report.activations.index(report.first_place)]
    assert all(each.relative < 1e-5 for each in before)


def test_of_several_damaged_files_the_first_in_use_is_named(tmp_path: Path) -> None:
    source, ft_dir = write_pair("t5", tmp_path)
    first = "encoder.block.1.layer.0.SelfAttention.q.weight.1.bin"
    for name in ("lm_head.weight.bin", "decoder.block.0.layer.0.SelfAttention.o.weight.0.bin"):
        if (ft_dir / name).exists():
            damage(ft_dir / name)
    damage(ft_dir / first)
    report = found(source, ft_dir)
    assert report.first_file is not None
    assert (report.first_file.file, report.first_file.where) == (first, "encoder layer 1")


def test_a_change_that_no_layer_shows_is_found_in_the_files(tmp_path: Path) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    damage(ft_dir / "model.wpe.bin", -1)  # of a position that the prompt does not reach
    report = found(source, ft_dir)
    assert report.first_place is None
    assert not report.equal
    assert report.first_file is not None
    assert report.first_file.tensor == "model.wpe"


def test_a_tensor_that_the_folder_leaves_out_is_a_deviation(tmp_path: Path) -> None:
    source, ft_dir = write_pair("llama", tmp_path)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.bias"
    save_file({**weights, name: torch.ones(24)}, source / "model.safetensors", {"format": "pt"})
    report = found(source, ft_dir)
    assert not report.equal
    assert report.weights.conflicts == (f"{name} of the source is not in the folder",)


def test_a_head_of_its_own_beside_a_tie_is_a_deviation(tmp_path: Path) -> None:
    source, ft_dir = write_pair("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    report = found(source, ft_dir)
    assert not report.equal
    assert "tie_word_embeddings=true" in report.weights.conflicts[0]


def test_values_that_are_not_finite_are_a_deviation(tmp_path: Path) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    file = ft_dir / "model.layers.0.mlp.dense_h_to_4h.bias.0.bin"
    np.full(file.stat().st_size // 4, np.nan, np.float32).tofile(file)
    report = found(source, ft_dir)
    assert not report.equal
    assert report.first_file is not None
    assert report.first_file.file == file.name
    assert "holds values that are not finite" in report.uncomputed
    assert json.loads(report.to_json())["weights"]["differences"][0]["max_abs"] == "inf"


def change_setting(ft_dir: Path, key: str, value: str) -> None:
    ini = ft_dir / "config.ini"
    text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", ini.read_text())
    assert count == 1
    ini.write_text(text)
    (ft_dir.parent / f"{ft_dir.name}.manifest.json").unlink()


def test_wrong_setting_is_named_when_the_weights_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    change_setting(ft_dir, "layernorm_eps", "0.5")
    assert main(["--checkpoint-path", str(source), "--ft-dir", str(ft_dir)]) == 1
    reported = capsys.readouterr().out
    assert "config.ini: layernorm_eps = 0.5, the source makes it 1e-05" in reported
    assert "first deviating layer:  layer 0, attention" in reported
    assert "a setting of config.ini" in reported.splitlines()[-1]


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=["whole", "of 4 training ranks"])
def test_nemo_archive_is_compared_by_its_tensors(
    layout: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_nemo(tmp_path / "gpt.nemo", **layout)
    ft_dir = convert_to(source, tmp_path)
    words = ["--checkpoint-path", str(source), "--ft-dir", str(ft_dir)]
    assert main(words) == 3
    reported = capsys.readouterr().out
    assert "every weight is the same; no layer was compared" in reported
    assert "52 tensors in 76 files, as the converter would write them" in reported
    assert "this nemo checkpoint is computed by NVIDIA's nemo_toolkit" in reported
    damage(ft_dir / "model.layers.3.mlp.dense_h_to_4h.weight.1.bin", 9)
    assert main(words) == 1
    reported = capsys.readouterr().out
    assert "(model.layers.3.mlp.dense_h_to_4h.weight.1.bin), layer 3" in reported


def test_wrong_setting_of_a_nemo_folder_is_a_deviation(tmp_path: Path) -> None:
    source = write_nemo(tmp_path / "gpt.nemo")
    ft_dir = convert_to(source, tmp_path)
    change_setting(ft_dir, "layernorm_eps", "0.5")
    report = found(source, ft_dir)
    assert report.weights.settings == ("layernorm_eps = 0.5, the source makes it 1e-05",)
    assert not report.equal


@pytest.mark.parametrize("name", ["gpt_tp2", "llama_tp2"])
def test_megatron_core_checkpoint_is_computed_by_its_own_library(
    name: str, shared: Path, tmp_path: Path
) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is missing: pip install 'megatron-core>=0.12'")
    source = shared / "golden" / "gpt_mcore" / name / "source" / "model.nemo"
    ft_dir = convert_to(source, tmp_path)
    report = found(source, ft_dir)
    assert report.equal, report.to_json()
    assert (len(report.activations), report.source.split()[0]) == (9, "megatron-core")
    assert max(each.relative for each in report.activations) < 1e-5
    damage(ft_dir / "model.layers.1.attention.dense.weight.0.bin")
    place = found(source, ft_dir).first_place
    assert place is not None
    assert str(place.place) == "layer 1, attention"


@pytest.mark.parametrize(
    "settings",
    [
        {"bias_activation_fusion": True},
        {"bias_activation_fusion": False},
        {"bias_activation_fusion": False, "openai_gelu": True},
    ],
    ids=["fused", "by erf", "OpenAI's"],
)
def test_gated_gelu_has_the_form_that_megatron_core_computes(
    settings: dict[str, bool], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core", reason="pip install 'megatron-core>=0.12'")
    torch.manual_seed(0)
    source = write_core(tmp_path / "model.nemo", core_state(), activation="geglu", **settings)
    report = found(source, convert_to(source, tmp_path))
    # Sums in another order; the other form of gelu is some 1e-4 away.
    assert max(each.relative for each in report.activations) < 1e-5


def test_missing_library_is_named_and_the_weights_are_compared(
    shared: Path, tmp_path: Path
) -> None:
    if find_spec("megatron") is not None:
        pytest.skip("megatron-core is installed")
    source = shared / "golden" / "gpt_mcore" / "gpt_tp2" / "source" / "model.nemo"
    report = found(source, convert_to(source, tmp_path))
    assert report.weights_alone
    assert not report.equal
    assert report.weights.tensors == 28
    assert "pip install 'megatron-core>=0.12'" in report.uncomputed


@pytest.mark.parametrize(
    ("case", "tensors", "not_compared"),
    [("gptneox/parallel_residual", 30, 0), ("t5/v1_1_gated_gelu_untied", 60, 0),
     ("opt/post_ln_projected", 27, 0), ("t5_nemo/linear_adapter", 84, 32)],
)  # fmt: skip
def test_folders_of_nvidias_converters_hold_the_same_tensors(
    shared: Path, tmp_path: Path, case: str, tensors: int, not_compared: int
) -> None:
    golden = shared / "golden" / case
    source = golden / json.loads((golden / "case.json").read_text())["source"]
    weights = found(source, unpack_case(golden, tmp_path, tp_size=1)).weights
    assert (weights.tensors, weights.differences, weights.missing) == (tensors, (), ())
    assert len(weights.not_compared) == not_compared


def test_report_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    name = "model.layers.0.input_layernorm.bias.bin"
    damage(ft_dir / name)
    file = tmp_path / "parity.json"
    words = ["--checkpoint-path", str(source), "--ft-dir", str(ft_dir), "--json", str(file)]
    assert main([*words, "--prompt-ids", "3,1,4"]) == 1
    values = json.loads(file.read_text())
    assert values["first_deviation"] == {"place": "layer 0, attention", "file": name}
    assert (values["equal"], len(values["activations"])) == (False, 9)


def test_report_is_shown_even_where_its_json_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    words = ["--checkpoint-path", str(source), "--ft-dir", str(ft_dir)]
    assert main([*words, "--json", str(tmp_path / "no folder" / "parity.json")]) == 2
    shown = capsys.readouterr()
    assert "equal within the tolerance" in shown.out
    assert "no folder" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint-path", "nowhere"], "checkpoint nowhere does not exist"),
        (["--ft-dir", "nowhere"], "nowhere cannot be loaded"),
        (["--prompt-ids", "3,53"], "token id 53 is not below vocab_size=53"),
        (["--prompt-ids", ",".join(["1"] * 41)], "41 token ids exceed max_position_embeddings=40"),
        (["--text", "hello"], "holds no tokenizer"),
        (["--set", "head_num"], "--set head_num is not KEY=VALUE"),
    ],
)
def test_bad_input_is_reported_and_ends_with_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ft_dir = write_pair("gpt2", tmp_path)
    assert main(["--checkpoint-path", str(source), "--ft-dir", str(ft_dir), *words]) == 2
    assert message in capsys.readouterr().err


def test_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    _, ft_dir = write_pair("llama", tmp_path / "llama")
    source = write_model("gpt2", tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"=llama, but .* is a gpt model"):
        found(source, ft_dir)


def test_folder_of_other_sizes_is_refused_with_the_differences(tmp_path: Path) -> None:
    _, ft_dir = write_pair("gpt2", tmp_path)
    source = write_model("gpt2", tmp_path / "shorter", n_positions=30)
    with pytest.raises(ValueError, match="max_pos_seq_len = 40, the source makes it 30") as error:
        found(source, ft_dir)
    assert "model.wpe has shape [40, 24], the source makes it [30, 24]" in str(error.value)
