"""Architectures that the forward pass lacks are refused by name, everything at once."""

from typing import Any

import pytest

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.weights import check_architecture

SIZES: dict[str, Any] = {
    "head_num": 4, "kv_head_num": 2, "size_per_head": 8, "hidden": 32, "inter_size": 56,
    "num_layer": 3, "vocab_size": 53, "position": "rotary_half",
}  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"has_output_norms": True, "residual": "parallel"}, "has_output_norms: supported with"),
        ({"residual_scale": 0.5, "norm_before": False}, "residual_scale: supported with"),
        ({"has_input_norms": False}, "has_input_norms or has_output_norms must be set"),
    ],
)
def test_each_problem_is_named(choices, problem):
    check_architecture(DecoderArchitecture(**SIZES), tp_size=2)
    with pytest.raises(ValueError, match=problem):
        check_architecture(DecoderArchitecture(**{**SIZES, **choices}), tp_size=2)


def test_all_problems_are_named_at_once():
    choices = {"has_input_norms": False, "norm_before": False, "inter_size": 55}
    with pytest.raises(
        ValueError, match=r"(?s)inter_size.*has_input_norms: supported.*must be set"
    ):
        check_architecture(DecoderArchitecture(**{**SIZES, **choices}), tp_size=2)
