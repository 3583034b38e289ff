"""Hugging Face folders from every kind of source: equal to the byte, loaded, refused, continued."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.conversion import sharding, write
from export_scripts.conversion.convert import (
    check_conversion,
    convert,
    folder_problems,
)
from export_scripts.families.mapping import sources
from inference.certify.certificate import Certificate
from inference.certify.certify import certify
from inference.certify.options import CertifySection
from tests.conversions import folder_of, problems_of, refusal, request_of, written
from tests.json_files import read_json
from tests.looks import assert_exact, mentions
from tests.tiny import (
    TinyGPT,
    gpt_tensors,
    write_megatron,
    write_nemo,
)
from tests.tiny_distributed import megatron_common, write_distributed
from tests.tiny_huggingface import copy_of, read_tensors
from tests.tiny_megatron_core import core_state, write_core
from tests.tiny_transformers import MODELS, write_model
from tests.unit.export_scripts.checkpoints.test_distributed import ARGS

# A family's names of its sizes: heads, size of a head, MLP, layers, vocabulary.
GPT2 = ("n_head", "n_embd", "n_inner", "n_layer", "vocab_size")
LLAMA = (
    "num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
)  # fmt: skip
SIZES: Mapping[str, tuple[str, ...]] = {
    "gpt2": GPT2,
    "gptj": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": ("num_heads", "hidden_size", "intermediate_size", "num_layers", "vocab_size"),
    "granite_4": (
        "num_attention_heads",
        "hidden_size",
        "shared_intermediate_size",
        "num_hidden_layers",
        "vocab_size",
    ),
    "codegen": GPT2,
    "bloom": ("n_head", "hidden_size", "", "n_layer", "vocab_size"),
    "mpt": ("n_heads", "d_model", "", "n_layers", "vocab_size"),
    "opt": ("num_attention_heads", "hidden_size", "ffn_dim", "num_hidden_layers", "vocab_size"),
    "bert": LLAMA,
    "t5": ("num_heads", "d_model", "d_ff", "num_layers", "vocab_size"),
}
# Settings by which whole heads are rotated, and those of each layer.
WHOLE_HEADS = {
    "gptneox": "rotary_pct", "phi": "partial_rotary_factor", "stablelm": "partial_rotary_factor",
}  # fmt: skip
LAYERS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "gemma3": lambda count: {"layer_types": (["sliding_attention", "full_attention"] * 2)[:count]},
    "cohere2": lambda count: {"layer_types": ["sliding_attention"] * count},
    "gpt_neo": lambda count: {"attention_types": [[["local"], count]]},
    "granite_4": lambda count: {"layer_types": ["attention"] * count},
}
KIND = {"t5-encoder": "t5_encoder"}
# Rows of OPT's positions that no token uses: FT does not store them.
UNUSED_ROWS = {"model.decoder.embed_positions.weight": 2}
# Biases of which each rank holds a share, which fp16 rounds where it is not a normal number.
DIVIDED = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")


_NEW = ("new", "one-norm")  # of Falcon's, those with fewer key than query heads


def sized(name: str, heads: int, size: int, inter: int, layers: int, vocab: int) -> dict[str, Any]:
    base = name.split("-")[0].replace("mt5", "t5")
    keys = SIZES.get(base, LLAMA)
    values = (heads, heads * size, inter, layers, vocab)
    changes: dict[str, Any] = {key: value for key, value in zip(keys, values, strict=True) if key}
    if base in WHOLE_HEADS:
        changes[WHOLE_HEADS[base]] = 1.0
    if base in LAYERS:
        changes |= LAYERS[base](layers)
    if base in ("gptj", "codegen"):
        changes["rotary_dim"] = 2 * math.ceil(size / 4)
    if base == "t5":
        changes |= {"d_kv": size, "d_model": heads * size + 3}
    if base == "opt":
        changes |= {"word_embed_proj_dim": heads * size, "do_layer_norm_before": layers != 2}
    if SIZES.get(base, LLAMA) is LLAMA and base not in ("bert", "gptneox"):
        changes |= {"head_dim": size, "hidden_size": heads * (size + 1)}
        changes |= {"num_key_value_heads": heads // (1 + layers % 2)}
    if base == "falcon":
        changes["ffn_hidden_size"] = inter
        changes["num_kv_heads"] = heads // (1 + layers % 2) if name[7:] in _NEW else heads
    # Heads are of the hidden size by heads.
    if base in ("phi3", "starcoder2", "falcon", "stablelm", "cohere2", "helium"):
        own = changes["head_dim"] if base == "helium" else changes.pop("head_dim")
        changes["hidden_size"] = heads * own
    if base in ("nemotron", "glm", "glm4"):  # which rotate half of a head
        changes["head_dim"] = 2 * size
    if base == "phi3":
        factors = {"short_factor": [1.25] * (size // 2), "long_factor": [1.5] * (size // 2)}
        changes["rope_parameters"] = {
            "rope_type": "longrope", "partial_rotary_factor": 1.0, **factors
        }  # fmt: skip
    if name == "llama":
        changes |= {"attention_bias": layers == 3, "mlp_bias": layers == 2}
    return changes


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_a_model_comes_back_from_shards_equal_to_the_byte(name, tmp_path, soak):
    chance = random.Random(name)
    for number in range(soak):
        folder = tmp_path / str(number)
        heads, size = chance.choice((4, 8)), 2 * chance.randint(1, 5)
        inter, layers, vocab = (
            4 * chance.randint(1, 9),
            chance.randint(1, 3),
            chance.randint(20, 70),
        )
        tp_size, kind = chance.choice((1, 2, 4)), chance.choice(("fp32", "fp16", "bf16"))
        shard = chance.choice((1000, 20_000, 10**9))
        sizes = sized(name, heads, size, inter, layers, vocab)
        original = write_model(name, folder / "original", **sizes)
        first = {"weight_data_type": kind, "model_type": KIND.get(name)}
        shards = folder_of(original, folder / "shards", tp_size=tp_size, **first)
        back = written(shards, folder / "back", weight_data_type=kind, max_shard_bytes=shard)
        assert folder_problems(back) == []
        direct = written(original, folder / "direct", **first)
        expected, found, unsplit = (
            {key: torch.atleast_1d(value) for key, value in tensors_of(each).items()}
            for each in (original, back, direct)
        )
        divided = DIVIDED if name == "gptneox-parallel" else ()
        # Saved by transformers 5, which ties every mT5; unscaled logits need a head of their own.
        extra = {"lm_head.weight"} if name == "mt5" else set()
        assert found.keys() - extra == expected.keys()
        for key, value in expected.items():
            rows = UNUSED_ROWS.get(key, 0)
            value = value.to(found[key].dtype)
            assert torch.equal(unsplit[key][rows:], value[rows:]), key
            if key.endswith(divided):
                value = value / tp_size * tp_size
            assert torch.equal(found[key][rows:], value[rows:]), key
        assert unsplit.keys() == found.keys()
        exact = [key for key in found if not key.endswith(divided)]
        assert all(torch.equal(unsplit[key], found[key]) for key in exact)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors(folder)
    from safetensors import safe_open

    found = {}
    for key, name in read_json(index)["weight_map"].items():
        with safe_open(folder / name, "pt") as file:
            found[key] = file.get_tensor(key)
    return found


def test_a_bert_from_shards_lacks_its_embeddings(tmp_path):
    original = write_model("bert", tmp_path / "original")
    shards = folder_of(original, tmp_path, tp_size=2)
    with pytest.raises(ValueError, match="without its embeddings: convert the original"):
        written(shards, tmp_path)
    assert not (tmp_path / "huggingface").exists()
    layers = tensors_of(written(shards, tmp_path, allow=("embeddings",)))
    expected = read_tensors(original)
    for key, value in layers.items():
        assert torch.equal(value, expected[key.removeprefix("bert.")])
    assert len(layers) == sum("encoder.layer" in key for key in expected)


NO_FINAL_NORM = {"layernorm_type": "post_layernorm", "has_post_decoder_layernorm": "False"}
NO_POSITIONS = {"has_positional_encoding": "False"}


def edited(shards: Path, settings_: Mapping[str, str]) -> Path:
    """Change config.ini, and remove the files that the folder then must not have."""
    config = shards / "config.ini"
    kept = [
        line for line in config.read_text().splitlines() if line.split(" =")[0] not in settings_
    ]
    changed = [f"{key} = {value}" for key, value in settings_.items()]
    config.write_text("\n".join([kept[0], *changed, *kept[1:]]))
    (shards.parent / f"{shards.name}.manifest.json").unlink()
    for name in ("model.final_layernorm.weight.bin", "model.final_layernorm.bias.bin"):
        if "has_post_decoder_layernorm" in settings_:
            (shards / name).unlink()
    if "has_positional_encoding" in settings_:
        (shards / "model.wpe.bin").unlink()
    return shards


def test_a_gpt_goes_to_the_model_that_is_its_equal(tmp_path):
    shards = folder_of(write_model("gpt2", tmp_path / "original"), tmp_path)
    folder = written(edited(shards, NO_FINAL_NORM), tmp_path)
    assert read_json(folder / "config.json")["model_type"] == "opt"
    assert folder_problems(folder) == []


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        (
            NO_FINAL_NORM | {"layernorm_eps": "0.5"},
            "layernorm_eps is 0.5 in the model, and can only be",
        ),
        (NO_POSITIONS, "position is none in the model, and can only be learned"),
    ],
)
def test_settings_that_no_model_has_are_refused_and_leave_nothing(settings_, words, tmp_path):
    shards = folder_of(write_model("gpt2", tmp_path / "original"), tmp_path)
    text = refusal(edited(shards, settings_), tmp_path, output_format="huggingface")
    assert words in text
    assert "has no equal in Hugging Face" in text
    assert words in problems_of(shards, tmp_path / "out", output_format="huggingface")


def test_a_flipped_bit_of_the_shards_is_found_without_their_source(tmp_path):
    shards = folder_of(write_model("llama", tmp_path / "original"), tmp_path, tp_size=2)
    victim = shards / "model.layers.1.mlp.dense_4h_to_h.weight.1.bin"
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ValueError, match="does not match its checksum") as error:
        written(shards, tmp_path)
    assert str(victim) in str(error.value)
    assert not (tmp_path / "huggingface").exists()


def test_the_folder_is_validated_against_its_manifest(tmp_path):
    folder = written(write_model("gptj", tmp_path / "original"), tmp_path, max_shard_bytes=20_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert folder_problems(folder) == []
    content = bytearray(shards[0].read_bytes())
    content[-1] ^= 1
    shards[0].write_bytes(content)
    (problem,) = folder_problems(folder)
    assert problem == f"{shards[0].name} differs from the checksum in the manifest (crc32)"
    shards[1].unlink()
    assert mentions(folder_problems(folder), f"{shards[1].name} is missing")


def test_a_finished_folder_is_kept_and_another_one_is_not_replaced(tmp_path):
    source = write_model("gpt2", tmp_path / "original")
    fields = {"weight_data_type": "fp16", "output_format": "huggingface"}
    request = request_of(source, tmp_path, **fields)
    assert not convert(request).already_done
    assert convert(request).already_done
    with pytest.raises(ValueError, match="holds another conversion"):
        written(source, tmp_path)
    assert check_conversion(request) == []


def test_values_that_fp16_lacks_leave_no_folder(tmp_path):
    source = copy_of(
        write_model("gpt2", tmp_path / "original"),
        tmp_path / "large",
        tensors={"transformer.ln_f.bias": torch.full((24,), 1e6)},
    )
    with pytest.raises(ValueError, match=r"transformer.ln_f.bias: values up to 1e\+06"):
        written(source, tmp_path, weight_data_type="fp16")
    assert not list(tmp_path.glob("*huggingface*/*"))


def test_shards_of_shards_are_refused(tmp_path):
    shards = folder_of(write_model("gpt2", tmp_path / "original"), tmp_path)
    with pytest.raises(
        ValueError, match="is a folder of shards, which cannot be converted to other"
    ):
        folder_of(shards, tmp_path / "again", tp_size=2)


def test_a_hugging_face_folder_has_no_ranks(tmp_path):
    source = write_model("gpt2", tmp_path / "original")
    with pytest.raises(ValueError, match="--tensor-model-parallel-size=2: a huggingface folder"):
        written(source, tmp_path, tp_size=2)


def certified(
    source: Path, folder: Path, tmp_path: Path, given: Sequence[tuple[str, str]] = ()
) -> Certificate:
    places: dict[str, Any] = {"source": str(source), "folder": str(folder)}
    return certify(CertifySection(**places, output_dir=str(tmp_path / "certificate")), given)


def assert_equal(certificate: Certificate) -> None:
    parts = {each.name: each for each in certificate.parts}
    assert parts["tensors"].status == "equal", certificate.verdict
    # Shards of some families do not record the longest sequence.
    settings = {each.where for each in parts["settings"].findings if each.status != "equal"}
    assert settings <= {"max_position_embeddings"}, certificate.verdict
    assert max(row["relative"] for row in parts["layers"].rows) < 1e-5


def megatron_forms(folder: Path) -> dict[str, Path]:
    """Return the four forms in which Megatron's checkpoints come, of one GPT and of one Llama."""
    gpt = gpt_tensors(TinyGPT())
    torch.manual_seed(3)
    state = core_state()
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    common = megatron_common(**ARGS, rotary_base=500000)
    return {
        "nemo": write_nemo(folder / "gpt.nemo", gpt, tp=2, pp=2),
        "megatron": write_megatron(folder / "megatron", gpt, tp=2, pp=1),
        "core": write_core(folder / "core.nemo", state, rotary_base=500000),
        "distributed": write_distributed(folder / "distributed", bare, common=common),
    }


@pytest.mark.parametrize("form", ["nemo", "megatron", "core", "distributed"])
def test_each_of_megatrons_forms_leaves_with_what_our_engine_computes(form, tmp_path):
    source = megatron_forms(tmp_path)[form]
    ids = () if form in ("nemo", "megatron") else (("start_id", "1"), ("end_id", "2"))
    folder = written(source, tmp_path / form, given=ids)
    config = read_json(folder / "config.json")
    assert config["model_type"] == ("llama" if ids else "gpt2")
    assert_equal(certified(source, folder, tmp_path, given=ids))


def test_forms_of_one_model_leave_as_the_same_bytes(tmp_path):
    forms = megatron_forms(tmp_path)
    ids = (("start_id", "1"), ("end_id", "2"))
    folders = {
        form: written(source, tmp_path / form, given=() if form in ("nemo", "megatron") else ids)
        for form, source in forms.items()
    }
    weights = {form: (each / "model.safetensors").read_bytes() for form, each in folders.items()}
    assert weights["nemo"] == weights["megatron"]
    assert weights["core"] == weights["distributed"]


def test_scales_that_are_stored_as_their_distance_from_one_leave_whole(tmp_path):
    tensors = gpt_tensors(TinyGPT())
    plain, folded = (
        read_tensors(
            written(
                write_nemo(tmp_path / f"{word}.nemo", tensors, config={"normalization": word}),
                tmp_path / word,
            )
        )
        for word in ("layernorm", "layernorm1p")
    )
    for key, value in plain.items():
        is_scale = key.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        assert torch.equal(folded[key], value + 1 if is_scale else value), key


def test_a_folder_of_another_converter_needs_neither_manifest_nor_name(tmp_path):
    shards = folder_of(write_model("bloom", tmp_path / "original"), tmp_path, tp_size=2)
    config = shards / "config.ini"
    named = config.read_text().split("\n")
    config.write_text("\n".join("model_name =" if "model_name" in x else x for x in named))
    (tmp_path / "2-gpu.manifest.json").unlink()
    assert read_json(written(shards, tmp_path) / "config.json")["n_head"] == 4


def wide_heads(path: Path) -> Path:
    """Return a Llama in megatron-core's layout, whose heads are 16 kB each."""
    shapes = {
        "linear_qkv.weight": (2 * (2 + 2) * 64, 64), "linear_proj.weight": (64, 4 * 64),
        "linear_fc1.weight": (112, 64), "linear_fc2.weight": (64, 56),
        "word_embeddings.weight": (53, 64), "output_layer.weight": (53, 64),
    }  # fmt: skip
    torch.manual_seed(3)
    state = {
        name: torch.randn(shapes.get(".".join(name.split(".")[-2:]), (64,)))
        for name in core_state()
    }
    return write_core(path, state, hidden_size=64, kv_channels=64)


def test_a_head_that_begins_in_a_chunk_ends_in_it(tmp_path, monkeypatch):
    source, ids = wide_heads(tmp_path / "core.nemo"), (("start_id", "1"), ("end_id", "2"))
    expected = written(source, tmp_path / "whole", given=ids) / "model.safetensors"
    monkeypatch.setattr(sharding, "_WORKSPACE", sharding.Workspace(1 << 12))
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(sharding, "LARGE_BYTES", 1 << 12)
    found = written(source, tmp_path / "cut", given=ids) / "model.safetensors"
    assert found.read_bytes() == expected.read_bytes()


def test_an_interrupted_folder_is_continued(tmp_path, monkeypatch):
    source = write_model("gptj", tmp_path / "original")
    options: dict[str, Any] = {"max_shard_bytes": 20_000, "processes": 1}
    expected = tensors_of(written(source, tmp_path / "whole", **options))
    calls = iter(range(15))

    def rearranged(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return sources.rearranged(*arguments)

    monkeypatch.setattr(write, "rearranged", rearranged)
    with pytest.raises(KeyboardInterrupt):
        written(source, tmp_path, **options)
    assert not (tmp_path / "huggingface").exists()
    done = len(list((tmp_path / ".huggingface.partial").glob("*.safetensors")))
    monkeypatch.undo()
    summary = convert(request_of(source, tmp_path, output_format="huggingface", **options))
    assert done > 0
    assert summary.written_bytes < sum(f.stat().st_size for f in summary.ft_dir.glob("*.safe*"))
    found = tensors_of(summary.ft_dir)
    assert_exact(found, expected)
