"""Rotary settings in the spellings of different transformers versions."""

import math
from typing import Any

import pytest

from export_scripts.families.mapping.rotary import rotary_fields
from export_scripts.families.mapping.settings import Settings


def read(config: dict[str, Any], **options: Any) -> Any:
    settings = Settings({"max_position_embeddings": 64, **config})
    rotary = rotary_fields(settings, 8, **{"fraction": 1.0, **options})
    settings.finish()
    return rotary


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"model_type": "gpt_neox", "rotary_emb_base": 5e5, "rotary_pct": 0.5},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ],
)
def test_old_and_new_spellings_mean_the_same(config):
    rotary = read(config)
    assert rotary == {"rotary_embedding": 4, "rotary_base": 5e5}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_scaling_is_named_by_either_key(key):
    rotary = read({"rope_scaling": {key: "linear", "factor": 2.0}})
    assert (rotary["rotary_scaling_type"], rotary["rotary_factor"]) == ("linear", 2.0)


def test_dynamic_scaling_begins_at_the_models_limit():
    rotary = read({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert rotary["rotary_original_max_position_embeddings"] == 64


def test_yarn_computes_the_factor_of_sine_and_cosine():
    rotary = read({"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert rotary["rotary_attention_factor"] == pytest.approx(0.1 * math.log(4.0) + 1)
    assert rotary["rotary_original_max_position_embeddings"] == 64
    stated = read({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}})
    assert stated["rotary_attention_factor"] == 1.5


def test_the_fraction_of_the_family_holds_where_none_is_named():
    assert read({}, fraction=0.25)["rotary_embedding"] == 2


def test_unknown_scaling_is_reported_with_the_known_ones():
    with pytest.raises(ValueError, match="'ntk' cannot be represented; known: default, lin"):
        read({"rope_scaling": {"type": "ntk", "factor": 2.0}})


@pytest.mark.parametrize(
    ("outside", "name"),
    [("rope_theta", "rope_theta"), ("rotary_emb_base", "rope_theta"),
     ("partial_rotary_factor", "partial_rotary_factor"), ("rotary_pct", "partial_rotary_factor")],
)  # fmt: skip
def test_two_values_of_which_releases_read_different_ones_are_refused(outside, name):
    stated = {"model_type": "gpt_neox", outside: 0.5}
    assert read({**stated, "rope_parameters": {name: 0.5}})
    with pytest.raises(ValueError, match=name):
        read({**stated, "rope_parameters": {name: 0.25}})


def test_truncate_which_releases_apply_differently_in_layers_apart_is_refused():
    given = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "truncate": True}
    assert read({"rope_scaling": given}, local_base=1e4)["rotary_truncate"]
    given["truncate"] = False
    assert not read({"rope_scaling": given})["rotary_truncate"]
    with pytest.raises(ValueError, match="truncate"):
        read({"rope_scaling": given}, local_base=1e4)
