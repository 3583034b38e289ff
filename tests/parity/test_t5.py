"""Converted T5s, run by our runtime, give the logits of the models they were made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import material
from tests.conversions import folder_of
from tests.ft_folders import unpack_case
from tests.json_files import read_json
from tests.looks import relative_error
from tests.rank_threads import encoded_by, logits_by
from tests.t5_reference import Reference
from tests.tiny_t5 import BARE, TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import (
    adapter_tensors,
    ia3_scalers,
    write_adapter,
    write_ia3,
    write_prompts,
)

LONG = pytest.mark.long
# Relative to the largest value. fp32: another order of summation. fp16: weights rounded to 11 bits.
FP32_TOLERANCE = 1e-4
FP16_TOLERANCE = 1e-2

# (tensor-parallel, pipeline-parallel) sizes; the widest has every exchange of the others.
GRIDS = (
    (4, 2),
    *(pytest.param(*grid, marks=LONG) for grid in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))),
)
PROMPT = (5, 9, 2, 38, 17, 11, 23)
ANSWER = (2, 30, 8, 19, 4, 27)


def golden(name: str) -> Path:
    return material("golden", name)


def recorded(case: Path) -> tuple[list[int], list[int]]:
    facts = read_json(case / "greedy.json")
    start = facts.get("decoder_start_token_id", 0)
    return facts["prompt"], [start, *facts["continuation"][:-1]]


def check(folder: Path, reference: Reference, **options: Any) -> None:
    """Compare the logits of our runtime with those of the plain forward pass."""
    expected = reference.logits(reference.encode(PROMPT), ANSWER)
    ours = logits_by(folder, PROMPT, ANSWER, vocab_size=expected.shape[1], **options)
    assert relative_error(ours, expected) < FP32_TOLERANCE


# family/case -> widest tensor-parallel size of its recorded folders.
CASES = {
    "t5/relu_tied": 4,
    "t5/v1_1_gated_gelu_untied": 4,
    "t5/ul2_gated_silu": 1,
    "t5/mt5": 1,
    "t5_nemo/train_tp1_pp1_absolute_bias": 4,
    "t5_nemo/train_tp2_pp1_relative_geglu_nobias": 4,
    "t5_nemo/train_tp2_pp2_absolute_bias_gated": 4,
    "t5_nemo/subconfigs_kv_ne_hidden": 1,
    "t5_nemo/ia3_two_tasks": 1,
    "t5_nemo/prompt_table": 1,
}


@pytest.mark.parametrize("name", [*CASES, "t5_encoder/from_full_t5"])
def test_the_encoder_gives_the_recorded_output(name, tmp_path):
    case = golden(name)
    prompt, _ = recorded(case)
    ours = encoded_by(unpack_case(case, tmp_path, tp_size=1), prompt)
    expected = np.load(case / "encoder_hidden.npy").reshape(len(prompt), -1)
    assert relative_error(ours, expected) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("name", "tp_size"),
    CASES.items(),
)
def test_reference_folders_give_the_recorded_logits(name, tp_size, tmp_path):
    case = golden(name)
    prompt, answer = recorded(case)
    expected = np.load(case / "logits.npy")
    folder = unpack_case(case, tmp_path, tp_size=tp_size)
    ours = logits_by(folder, prompt, answer, vocab_size=expected.shape[1], tp_size=tp_size)
    assert relative_error(ours, expected) < FP32_TOLERANCE


@pytest.mark.parametrize("name", ["t5/v1_1_gated_gelu_untied", "t5_nemo/ia3_two_tasks"])
def test_half_precision_weights_are_close(name, tmp_path):
    case = golden(name)
    prompt, answer = recorded(case)
    expected = np.load(case / "logits.npy")
    folder = unpack_case(case, tmp_path, tp_size=2, data_type="fp16")
    ours = logits_by(
        folder, prompt, answer, vocab_size=expected.shape[1], tp_size=2, data_type="fp16"
    )
    assert relative_error(ours, expected) < FP16_TOLERANCE


@pytest.mark.parametrize(("tp_size", "pp_size"), GRIDS)
@pytest.mark.parametrize("model", [TinyT5(), BARE], ids=["absolute-bias", "relative-bare"])
def test_every_grid_of_ranks_gives_the_same_model(model, tp_size, pp_size, tmp_path):
    tensors = t5_tensors(model)
    source = write_t5(tmp_path / "t5.nemo", tensors, model)
    folder = folder_of(source, tmp_path, tp_size=tp_size)
    reference = Reference(tensors, model)
    grid = {"tp_size": tp_size, "pp_size": pp_size}
    encoded = reference.encode(PROMPT)
    assert relative_error(encoded_by(folder, PROMPT, **grid), encoded) < FP32_TOLERANCE
    check(folder, reference, **grid)


# Every row of the rules by which a NeMo model becomes one with or without biases.
RULES = {
    "layernorm with biases": TinyT5(),
    "layernorm1p with biases": TinyT5(normalization="layernorm1p"),
    "no head bias": TinyT5(head_bias=False),
    "bare as converted from elsewhere": TinyT5(
        bias=False, normalization="rmsnorm", normalised_scores=False, head_bias=False
    ),
    "bare with scaled scores": TinyT5(bias=False, normalization="rmsnorm", head_bias=False),
    "gelu by erf where it is not fused": TinyT5(fused_activation=False),
    "geglu by erf where it is not fused": TinyT5(activation="geglu", fused_activation=False),
    "OpenAI's gelu": TinyT5(fused_activation=False, openai_gelu=True),
    "biases with unscaled scores": TinyT5(normalised_scores=False),
    "layernorm without biases": TinyT5(bias=False, head_bias=False),
    "layernorm without biases but a head's": TinyT5(bias=False),
    "relative positions with biases": TinyT5(relative=True),
    "relative positions, bare": BARE,
    "rows of legacy order": TinyT5(legacy=True),
    "a head of its own": TinyT5(own_head=True),
    "geglu": TinyT5(activation="geglu"),
    "swiglu": TinyT5(activation="swiglu", bias=False, normalization="rmsnorm", head_bias=False),
    "reglu": TinyT5(activation="reglu"),
    "relu": TinyT5(activation="relu"),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_kind_of_nemo_model_is_converted_faithfully(rule, tmp_path):
    model = RULES[rule]
    tensors = t5_tensors(model)
    folder = folder_of(write_t5(tmp_path / "t5.nemo", tensors, model), tmp_path)
    check(folder, Reference(tensors, model))


# (training TP, PP, first decoder stage) -> inference TP.
RESHARDED = (((1, 1, 0), 4), ((2, 1, 0), 1), ((4, 1, 0), 2), ((2, 2, 1), 4), ((1, 3, 1), 2))


@pytest.mark.parametrize(
    ("training", "tp_size", "legacy"), [(*each, n % 2 > 0) for n, each in enumerate(RESHARDED)]
)
def test_training_ranks_and_stages_are_joined(training, tp_size, legacy, tmp_path):
    tp, pp, split = training
    model = TinyT5(own_head=True, legacy=legacy)
    tensors = t5_tensors(model)
    source = write_t5(tmp_path / "t5.nemo", tensors, model, tp=tp, pp=pp, split=split)
    folder = folder_of(source, tmp_path, tp_size=tp_size)
    check(folder, Reference(tensors, model), tp_size=tp_size)


@pytest.mark.parametrize(
    ("training", "tp_size", "later_names"),
    [
        ((1, 1, 0), 2, False),
        ((2, 3, 1), 2, True),
    ],
)
def test_each_ia3_task_acts_as_trained(training, tp_size, later_names, tmp_path):
    tp, pp, split = training
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "split": split}
    model = TinyT5()
    tensors = t5_tensors(model)
    tasks = [ia3_scalers(model, seed=seed) for seed in (1, 2)]
    archives = tuple(
        write_ia3(tmp_path / f"{n}.nemo", task, model, later_names=later_names, **layout)
        for n, task in enumerate(tasks)
    )
    source = write_t5(tmp_path / "t5.nemo", tensors, model, **layout)
    folder = folder_of(source, tmp_path, tp_size=tp_size, ia3_checkpoints=archives)
    for number, scalers in ((None, None), (0, tasks[0]), (1, tasks[1])):
        check(folder, Reference(tensors, model, scalers=scalers), task=number, tp_size=tp_size)


@pytest.mark.parametrize("model", [TinyT5(), BARE], ids=["biases", "bare"])
def test_ia3_multiplied_into_the_weights_acts_as_trained(model, tmp_path):
    tensors, scalers = t5_tensors(model), ia3_scalers(model)
    folder = folder_of(
        write_t5(tmp_path / "t5.nemo", tensors, model, tp=2),
        tmp_path,
        tp_size=2,
        ia3_checkpoints=(write_ia3(tmp_path / "ia3.nemo", scalers, model, tp=2),),
        ia3_in_place=True,
    )
    assert not list(folder.glob("*ia3*"))
    check(folder, Reference(tensors, model, scalers=scalers), tp_size=2)


@pytest.mark.parametrize(("training", "tp_size"), [((1, 1, 0), 4), ((2, 3, 1), 2)])
def test_linear_adapters_act_as_trained(training, tp_size, tmp_path):
    tp, pp, split = training
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "split": split}
    model = TinyT5()
    tensors, adapters = t5_tensors(model), adapter_tensors(model)
    folder = folder_of(
        write_t5(tmp_path / "t5.nemo", tensors, model, **layout),
        tmp_path,
        tp_size=tp_size,
        adapter_checkpoints=(write_adapter(tmp_path / "a.nemo", adapters, model, **layout),),
    )
    check(folder, Reference(tensors, model, adapters=adapters), tp_size=tp_size)


def test_virtual_tokens_take_the_place_of_words(tmp_path):
    model = TinyT5()
    tensors = t5_tensors(model)
    tables = {"first": torch.randn(3, model.hidden), "second": torch.randn(4, model.hidden)}
    folder = folder_of(
        write_t5(tmp_path / "t5.nemo", tensors, model),
        tmp_path,
        tp_size=2,
        prompt_checkpoints=(write_prompts(tmp_path / "p.nemo", tables),),
    )
    rows = [model.vocab_size + row for row in (3, 4, 5, 6)]  # the second task's
    prompt = [*rows, *PROMPT]
    reference = Reference(tensors, model)
    encoded = reference.encode(prompt, torch.cat(list(tables.values())))
    ours = logits_by(
        folder,
        prompt,
        ANSWER,
        vocab_size=model.vocab_size,
        has_virtual=True,
        tp_size=2,
    )
    assert relative_error(ours, reference.logits(encoded, ANSWER)) < FP32_TOLERANCE


def test_weights_of_8_bits_stay_close(tmp_path):
    # 8 bits per weight: a relative error of up to 1/256 in each of some dozen products.
    case = golden("t5_nemo/train_tp1_pp1_absolute_bias")
    prompt, answer = recorded(case)
    expected = np.load(case / "logits.npy")
    folder = unpack_case(case, tmp_path, tp_size=2, data_type="fp16")
    ours = logits_by(
        folder,
        prompt,
        answer,
        vocab_size=expected.shape[1],
        tp_size=2,
        data_type="fp16",
        int8_mode=1,
    )
    assert FP32_TOLERANCE < relative_error(ours, expected) < 5e-2
