"""Folders converted from Hugging Face models give those models' logits, for any tensor parallelism.

Models are random and tiny with sizes that are all different; transformers is the reference.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.mapping.settings import ALL_ACTIVATIONS
from inference.parallel.epilogue import activate, gemm_activation
from tests.conversions import folder_of
from tests.json_files import read_json, write_json
from tests.looks import relative_error
from tests.rank_threads import logits_of
from tests.tiny_transformers import MODELS, VARIANTS, model_of

IDS = [3, 17, 41, 5, 5, 29, 11, 50, 2, 8, 33, 19, 44, 7, 1, 23, 36, 14]

# Relative to the largest logit. Both sides compute in fp32 and differ in the order of sums only:
# some ten products of up to 96 terms in a row, each good to a few units in the last place.
TOLERANCE = 1e-5

# Ranks of each run, and how the prompt is cut into steps.
LAYOUTS: dict[tuple[int, int], tuple[int, ...]] = {(1, 1): (), (2, 1): (7, 1, 10), (4, 2): ()}


def check(
    model: Any,
    source: Path,
    output_dir: Path,
    *,
    tp_size: int = 2,
    pp_size: int = 1,
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float()
    ft_dir = folder_of(source, output_dir, tp_size=tp_size)
    chunks = LAYOUTS[tp_size, pp_size]
    found = logits_of(ft_dir, IDS, tp_size=tp_size, pp_size=pp_size, chunks=chunks, **settings)
    error = relative_error(found, expected)
    assert bool(settings) <= (error > 0)
    assert error < tolerance


LONG = pytest.mark.long
# Those with products of their own: with biases, tied, fused, shared, with another norm.
ROUNDED_MODELS = ("qwen2", "gemma3", "phi3", "falcon", "gpt_neo")
DECODERS = [name for name in MODELS if name not in ("t5", "mt5", "t5-encoder", "bert")]
# One of each form of block is cut by eight; the others are in `make soak`, as are single ranks.
EVERY_LAYOUT = (
    "gpt2",
    "gptj",
    "gptneox-parallel",
    "llama",
    "gemma2",
    "falcon-new",
    "cohere2",
    "apertus",
)
# Five layers, and six heads: no grid of 4 x 2.
UNEVEN = ("cwm", "mpt")
# Rotary settings that Llama has as well; one reader takes those of every family.
SAME_ROTARY = (
    "qwen3-longrope",
    "qwen2-yarn",
    "granite-linear",
    "gemma2-yarn",
    "olmo2-linear",
    "olmo2-dynamic",
    "olmo2-yarn",
    "smollm3-longrope",
    "starcoder2-base",
)


def layouts_of(name: str) -> Iterator[Any]:
    for grid in LAYOUTS:
        if grid == (4, 2) and name in UNEVEN:
            continue
        names = {(1, 1): ("gpt2", "llama"), (2, 1): DECODERS, (4, 2): EVERY_LAYOUT}[grid]
        yield pytest.param(name, *grid, marks=[LONG] * (name not in names))


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [each for name in DECODERS for each in layouts_of(name)]
    + [pytest.param(name, 2, 1, marks=[LONG] * (name in SAME_ROTARY)) for name in VARIANTS],
)
def test_folder_gives_the_logits_of_transformers(name, tp_size, pp_size, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "source")
    check(model, tmp_path / "source", tmp_path / "ft", tp_size=tp_size, pp_size=pp_size)


def build(name: str) -> Any:
    """Return a model that computes its attention as it is written."""
    return model_of(name, attn_implementation="eager")


# The largest error, of the largest logit: 8 bits of weights and of rows, 8 bits of every value.
ROUNDED: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "int8": ({"int8_mode": 1}, 0.15),
    "bf16": ({"data_type": "bf16"}, 0.05),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", ROUNDED_MODELS)
def test_rounded_weights_give_nearly_the_same_logits(name, kind, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "source")
    settings, tolerance = ROUNDED[kind]
    check(model, tmp_path / "source", tmp_path / "ft", tolerance=tolerance, **settings)


LINEAR = {"rope_type": "linear", "factor": 2.0}
# name -> changes of its config.json; None removes a key. transformers reads what is left.
EDITED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gptj-absent-rotary": ("gptj-wide", {"rotary_dim": None}),
    "neox-old-spelling": (
        "gptneox-parallel",
        {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10000},
    ),
    "llama-old-spelling": (
        "llama", {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 500.0}
    ),
    "llama-both-spellings": ("llama", {"rope_scaling": LINEAR}),
    "llama-window": ("llama", {"sliding_window": 5}),
    "mistral-unused-window": ("mistral", {"use_sliding_window": False}),
    "mistral-window-of-few-layers": ("mistral", {"max_window_layers": 2}),
    "mistral-absent-window": ("mistral", {"sliding_window": None}),
    "qwen2-absent-window-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": None,
         "layer_types": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_a_configuration_means_what_transformers_takes_it_for(name, tmp_path):
    base, changes = EDITED[name]
    build(base).save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    settings = read_json(path) | changes
    write_json(path, {key: v for key, v in settings.items() if v is not None})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", attn_implementation="eager"
    )
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "gptj", "gptneox-parallel", "qwen2"])
def test_shards_with_an_index_are_read(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="10KB")
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 1
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "llama-tied", "gptneox-parallel-tied"])
def test_bin_file_that_repeats_a_tied_head_is_read(name, tmp_path):
    model = build(name)
    model.config.save_pretrained(tmp_path / "source")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert any(key in state for key in ("lm_head.weight", "embed_out.weight"))
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "llama-tied", "gptneox-parallel-tied"])
def test_model_saved_without_its_head_class_is_read(name, tmp_path):
    model = build(name)
    model.base_model.save_pretrained(tmp_path / "source")
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ALL_ACTIVATIONS)
def test_activation_is_the_one_that_transformers_computes(name):
    spelling, exact_gelu = ALL_ACTIVATIONS[name]
    x = torch.linspace(-6, 6, 1001)
    ours = activate(
        x.clone(), gemm_activation(activation_choice(spelling)[0], exact_gelu=exact_gelu)
    )
    # Four units in the last place of the largest value; the two forms of gelu are 5e-4 apart.
    difference = (ours - transformers.activations.ACT2FN[name](x)).abs().max()
    assert float(difference) < 4 * 6 * torch.finfo(torch.float32).eps
