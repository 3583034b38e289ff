"""Certificates: sound folders of every family pass; a planted fault is named at its place."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inference.certify.__main__ import main
from inference.certify.certificate import Certificate, certificate_text, write_certificate
from inference.certify.certify import certify
from inference.certify.options import CertifySection
from tests.conversions import folder_of
from tests.ft_folders import unpack_case
from tests.openai_servers import write_tokenizer
from tests.tiny import write_nemo
from tests.tiny_megatron_core import core_state, write_core
from tests.tiny_transformers import MIXTURES, MODELS, write_model
from tests.unit.export_scripts.families.test_text_models import write_whole

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INDEX = "model.safetensors.index.json"
LAYER = "model.layers.{}."

Sources = Callable[[str], Path]


def convert_to(source: Path, folder: Path, **fields: object) -> Path:
    return folder_of(source, folder / "ft", **{"tp_size": 2, **fields})


def made(source: Path, folder: Path, *, layers: bool = False, **fields: Any) -> Certificate:
    output = folder.with_name("certificate")
    given = fields.pop("given", ())
    return certify(options(source, folder, output, layers=layers, **fields), given)


def options(source: Path, folder: Path, output: Path, **fields: Any) -> CertifySection:
    places: dict[str, Any] = {
        "source": str(source),
        "folder": str(folder),
        "output_dir": str(output),
    }
    return CertifySection(**places, **fields)


def part(certificate: Certificate, name: str) -> Any:
    return next(each for each in certificate.parts if each.name == name)


@dataclass
class Copy:
    """A foreign folder, to be damaged."""

    path: Path
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = load_file(self.path / "model.safetensors")

    def save(self) -> None:
        kept = {key: value.contiguous() for key, value in self.tensors.items()}
        save_file(kept, self.path / "model.safetensors", {"format": "pt"})

    def setting(self, file: str = "config.json", table: str = "", **changes: Any) -> None:
        path = self.path / file
        values = json.loads(path.read_text())
        changes = {table: {**values[table], **changes}} if table else changes
        values |= changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def sharded(self, *ghosts: str) -> None:
        """Replace the one file by an index and a file."""
        (self.path / "model.safetensors").rename(self.path / "model-1.safetensors")
        names = dict.fromkeys([*self.tensors, *ghosts], "model-1.safetensors")
        (self.path / INDEX).write_text(json.dumps({"weight_map": names}))


def copied(source: Path, folder: Path) -> Copy:
    return Copy(shutil.copytree(source, folder / "folder"))


def write_source(name: str, folder: Path) -> Path:
    """Write a model with a tokenizer of 300 tokens and a chat template."""
    write_model(name, folder, vocab_size=300)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")

    def source(name: str) -> Path:
        path = folder / name
        return path if path.exists() else write_source(name, path)

    return source


@pytest.fixture
def copy(tmp_path, sources: Sources) -> Copy:
    """Return a copy of the Llama."""
    return copied(sources("llama"), tmp_path)


def exchange(copy: Copy, one: str, other: str) -> None:
    copy.tensors[one], copy.tensors[other] = copy.tensors[other], copy.tensors[one]


def experts(copy: Copy) -> None:
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        name = "model.layers.0.mlp.experts.{}." + matrix + ".weight"
        exchange(copy, name.format(1), name.format(2))


def reorder_experts(copy: Copy, order: Sequence[int]) -> None:
    """Put the experts of the last layer, and what its router has of each, in another order."""
    own = {key: value for key, value in copy.tensors.items() if re.search(r"\.3\.(mlp|block)", key)}
    for key, value in own.items():
        if number := re.search(r"experts\.(\d+)\.", key):
            name = f"experts.{order[int(number[1])]}."
            copy.tensors[key] = own[key.replace(number[0], name)]
        elif len(order) in value.shape:
            axis = value.shape.index(len(order))
            copy.tensors[key] = value.index_select(axis, torch.tensor(order))


def layers_exchanged(copy: Copy) -> None:
    for key in [key for key in copy.tensors if key.startswith("model.layers.0.")]:
        exchange(copy, key, key.replace("layers.0", "layers.1"))


def rows_permuted(copy: Copy) -> None:
    own = copy.tensors["model.layers.1.self_attn.q_proj.weight"]
    own[8:16] = own[8:16].view(4, 2, -1).transpose(0, 1).reshape(8, -1).clone()


def columns_permuted(copy: Copy) -> None:
    own = copy.tensors["model.layers.0.self_attn.o_proj.weight"]
    own[:] = own.view(24, 4, 8)[:, [1, 0, 2, 3]].reshape(24, 32).clone()


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Copy], None]:
    def fault(copy: Copy) -> None:
        copy.tensors[key] = change(copy.tensors[key].clone())

    return fault


def put(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[row] = value
        return tensor

    return change


def padded(value: float) -> Callable[[Copy], None]:
    def fault(copy: Copy) -> None:
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            more = torch.zeros(4, 24)
            more[2] = value
            copy.tensors[key] = torch.cat([copy.tensors[key], more])
        copy.setting(vocab_size=304)

    return fault


def untied(copy: Copy) -> None:
    copy.tensors["lm_head.weight"] = copy.tensors["model.embed_tokens.weight"] + 0.5
    copy.setting(tie_word_embeddings=False)


def tied(copy: Copy) -> None:
    del copy.tensors["lm_head.weight"]
    copy.setting(tie_word_embeddings=True)


def ghosts(copy: Copy) -> None:
    copy.save()
    copy.sharded("model.layers.2.input_layernorm.weight")


def lost_shard(copy: Copy) -> None:
    copy.save()
    copy.sharded()
    table = json.loads((copy.path / INDEX).read_text())
    table["weight_map"]["model.norm.weight"] = "model-2.safetensors"
    (copy.path / INDEX).write_text(json.dumps(table))
    del copy.tensors["model.norm.weight"]
    save_file(copy.tensors, copy.path / "model-1.safetensors", {"format": "pt"})


def stale_tokenizer(copy: Copy) -> None:
    path = copy.path / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"]["merges"] = table["model"]["merges"][:-3]
    path.write_text(json.dumps(table))


END = "<|endoftext|>"


def texts_with_tokens(single: str, pair: str) -> dict[str, Any]:
    """Return a post-processor; in both templates, a letter is a text and a stroke the end token."""
    piece = {"|": {"SpecialToken": {"id": END, "type_id": 0}}} | {
        letter: {"Sequence": {"id": letter, "type_id": 0}} for letter in "AB"
    }
    return {
        "type": "TemplateProcessing",
        "single": [piece[each] for each in single],
        "pair": [piece[each] for each in pair],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }


def tokenizer(**changes: Any) -> Callable[[Copy], None]:
    """Change tables of tokenizer.json; those of `added` in its added tokens."""

    def fault(copy: Copy) -> None:
        path = copy.path / "tokenizer.json"
        table = json.loads(path.read_text())
        for token in table["added_tokens"]:
            token |= changes.get("added", {})
        path.write_text(json.dumps(table | {k: v for k, v in changes.items() if k != "added"}))

    return fault


def setting(*file: str, **changes: Any) -> Callable[[Copy], None]:
    return lambda copy: copy.setting(*file, **changes)


def template(text: str) -> Callable[[Copy], object]:
    return lambda copy: (copy.path / "chat_template.jinja").write_text(text)


def template_of_tools(copy: Copy) -> None:
    folder = copy.path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("another")


def without_system_turn(copy: Copy) -> None:
    own = TEMPLATE.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    (copy.path / "chat_template.jinja").write_text(own)


def no_template(copy: Copy) -> None:
    (copy.path / "chat_template.jinja").unlink()


def template_of_a_number(copy: Copy) -> None:
    no_template(copy)
    copy.setting("tokenizer_config.json", chat_template=5)


def fp8(copy: Copy, *, off: bool) -> None:
    """Quantise every matrix of the layers in blocks of 8 x 8, with scales of their own."""
    for key in [key for key in copy.tensors if key.endswith("_proj.weight")]:
        own = copy.tensors[key]
        rows, columns = own.shape
        blocks = own.view(rows // 8, 8, columns // 8, 8).transpose(1, 2)
        scales = blocks.abs().amax((2, 3)) / 448
        stored = (blocks / scales[..., None, None]).transpose(1, 2).reshape(rows, columns)
        copy.tensors[key] = stored.to(torch.float8_e4m3fn)
        if off and key == "model.layers.1.mlp.up_proj.weight":
            scales[2, 1] = scales[2, 2]
        copy.tensors[f"{key}_scale_inv"] = scales
    copy.setting(quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})


def scale_of_the_cache(copy: Copy, value: float = 1e9) -> None:
    copy.tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(value)
    fp8(copy, off=False)


def ignored(copy: Copy) -> None:
    fp8(copy, off=False)
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    copy.setting(quantization_config={**settings, "modules_to_not_convert": ["layers.1.mlp"]})


def lose_scale(copy: Copy) -> None:
    fp8(copy, off=False)
    del copy.tensors[f"{UP}_scale_inv"]


def packed(values: torch.Tensor, axis: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Pack numbers of 4 bits into words along an axis, the lowest bits first."""
    values = values.movedim(axis, -1).to(torch.int64)
    words = values.unflatten(-1, (-1, 8))[..., list(order)]
    found = (words << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().movedim(-1, axis)


def calibrated(matrix: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return integers (out, in) as GPTQ chooses them for correlated inputs.

    Each column's error is taken from the next columns (arXiv 2210.17323, algorithm 1).
    """
    torch.manual_seed(0)
    count = matrix.shape[1]
    inputs = torch.randn(512, 24) @ torch.randn(24, count) + torch.randn(512, count)
    upper = torch.linalg.cholesky(torch.linalg.inv(inputs.T @ inputs), upper=True)
    left, columns = matrix.clone(), []
    for column in range(count):
        scale, zero = scales[:, column], zeros[:, column]
        columns.append(((left[:, column] / scale).round() + zero).clamp(0, 15))
        error = left[:, column] - (columns[-1] - zero) * scale
        left -= torch.outer(error / upper[column, column], upper[column])
    return torch.stack(columns, 1)


def in_4_bits(
    copy: Copy,
    method: str,
    *,
    factor: float = 1.0,
    whole: float = 1.0,
    offset: int = 0,
    calibrate: bool = False,
) -> None:
    """Round every matrix of the layers to 4 bits in groups of 64 inputs, in a method's layout.

    The scales of row 5 of one matrix are off by a factor, all of it by another, and its zero
    points by an offset.
    """
    for key in [key for key in copy.tensors if key.endswith("_proj.weight")]:
        matrix = copy.tensors[key]
        groups = copy.tensors.pop(key).unflatten(1, (-1, 64))  # (out, groups, 64)
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        numbers = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)
        if calibrate:
            of_columns = (each.repeat_interleave(64, 1) for each in (scales, zeros))
            numbers = calibrated(matrix, *of_columns)
        if key == "model.layers.1.mlp.up_proj.weight":
            scales[5] *= factor
            scales *= whole
            zeros += offset
        name = key.removesuffix("weight")
        copy.tensors[f"{name}scales"] = scales.T.half()
        if method == "gptq":
            copy.tensors[f"{name}qweight"] = packed(numbers.T, 0)
            copy.tensors[f"{name}qzeros"] = packed(zeros.T - 1, 1)
            copy.tensors[f"{name}g_idx"] = torch.arange(numbers.shape[1], dtype=torch.int32) // 64
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            copy.tensors[f"{name}qweight"] = packed(numbers.T, 1, order)
            copy.tensors[f"{name}qzeros"] = packed(zeros.T, 1, order)
    # As GPTQModel writes them, of either method.
    form = {"gptq": "gptq", "awq": "gemm"}[method]
    more = {"sym": False} if method == "gptq" else {"version": form, "zero_point": True}
    settings = {
        "method": method, "quant_method": method, "bits": 4, "group_size": 64, "desc_act": False,
        "lm_head": False, "format": form, "checkpoint_format": form, "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.0.0"]}, **more,
    }  # fmt: skip
    copy.setting(quantization_config=settings)


def in_fp16(copy: Copy) -> None:
    copy.tensors = {key: value.half() for key, value in copy.tensors.items()}
    copy.tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
# A model that knows no other words, and no token for them.
KNOWN_WORDS = {
    "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
    "vocab": {END: 0, "Is": 1, "Ġit": 2, "Ġthe": 3, "Ġsame": 4, "?": 5, "It": 6, "Ġis": 7, ".": 8},
}  # fmt: skip

# name -> model, fault, part, the place that is named, what is said of it
OTHER_FLAGS = setting(
    "tokenizer_config.json",
    added_tokens_decoder={"0": {"content": END, "single_word": False, "special": False}},
)
FAULTS: Mapping[str, tuple[str, Callable[[Copy], object], str, str, str]] = {
    "two experts exchanged": (
        "qwen3-moe", experts, "tensors", "model.layers.0.mlp.experts.1.down_proj.weight",
        "model.layers.0.mlp.experts.2.down_proj.weight",
    ),
    "a norm of another layer": (
        "llama", lambda c: c.tensors.update({NORM: c.tensors[NORM.replace("1", "0")].clone()}),
        "tensors", NORM, "model.layers.0.input_layernorm.weight",
    ),
    "a tensor rounded twice": (
        "llama",
        lambda c: c.tensors.update(
            {key: (v.bfloat16() if key == UP else v).half() for key, v in c.tensors.items()}
        ),
        "tensors", UP, "as bf16 rounds them",
    ),
    "two layers exchanged": (
        "llama", layers_exchanged, "tensors", "model.layers.0.mlp.up_proj.weight", "layers.1.mlp",
    ),
    "keys for values": (
        "llama",
        lambda c: exchange(c, *(LAYER.format(1) + f"self_attn.{k}_proj.weight" for k in "kv")),
        "tensors", "model.layers.1.self_attn.k_proj.weight", "self_attn.v_proj",
    ),
    "gate for up": (
        "llama",
        lambda c: exchange(c, *(LAYER.format(1) + f"mlp.{k}_proj.weight" for k in ("gate", "up"))),
        "tensors", "model.layers.1.mlp.gate_proj.weight", "mlp.up_proj",
    ),
    "ghost entries of the index": (
        "llama", ghosts, "tensors", "model.layers.2.input_layernorm.weight",
        "listed and not stored",
    ),
    "a lost shard": ("llama", lost_shard, "tensors", "model.norm.weight", "missing"),
    "an untied head": ("gemma", untied, "tensors", "lm_head.weight", "plus 0.5"),
    "a tied head": ("llama", tied, "tensors", "tie_word_embeddings", "ties"),
    "a missing head": (
        "llama", lambda c: c.tensors.pop("lm_head.weight"), "tensors", "lm_head.weight",
        "missing",
    ),
    "rows of a head permuted": (
        "llama", rows_permuted, "tensors", "model.layers.1.self_attn.q_proj.weight",
        "rows are in another order; rows 9-14",
    ),
    "heads exchanged in the output": (
        "llama", columns_permuted, "tensors", "model.layers.0.self_attn.o_proj.weight",
        "columns are in another order",
    ),
    "one value": (
        "llama", changed("model.norm.weight", put(3, 7.0)), "tensors", "model.norm.weight",
        "rows 3-3",
    ),
    "a value that is not a number": (
        "llama", changed("model.norm.weight", put(3, torch.nan)), "tensors", "model.norm.weight",
        "up to inf",
    ),
    "a norm stored as the distance from 1": (
        "llama", changed(NORM, lambda t: t - 1), "tensors", NORM, "plus -1",
    ),
    "a matrix scaled": (
        "llama", changed("model.layers.0.mlp.down_proj.weight", lambda t: t * 0.5), "tensors",
        "model.layers.0.mlp.down_proj.weight", "times 0.5",
    ),
    "a transposed matrix": (
        "olmo2", changed("model.layers.1.mlp.up_proj.weight", lambda t: t.T.reshape(t.shape)),
        "tensors", "model.layers.1.mlp.up_proj.weight", "changed",
    ),
    "padding rows that are not zero": (
        "llama", padded(0.25), "tensors", "lm_head.weight",
        "padding rows are not zero; rows 302-302",
    ),
    "a scale of FP8 of the next block": (
        "llama", lambda c: fp8(c, off=True), "tensors", "model.layers.1.mlp.up_proj.weight",
        "rows 16-23, columns 8-15",
    ),
    "a value beyond the range of the type": (
        "llama", in_fp16, "tensors", "model.layers.0.mlp.up_proj.weight", "up to inf",
    ),
    "one tensor too many": (
        "llama", lambda c: c.tensors.update({"model.layers.0.mlp.bias": torch.ones(24)}),
        "tensors", "model.layers.0.mlp.bias", "extra",
    ),
    "a layer left out": (
        "llama", setting(num_hidden_layers=1), "settings", "num_layer", "2",
    ),
    "base of the rotary embedding": (
        "llama",
        setting(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "settings", "rotary.base", "500000.0",
    ),
    "rows of the head that the vocabulary lacks": (
        "llama", changed("lm_head.weight", lambda own: torch.cat([own, torch.zeros(4, 24)])),
        "settings", "vocab_size", "lm_head.weight has 304 rows",
    ),
    "another copy of the table": (
        "t5", lambda c: c.tensors.update(
            {"decoder.embed_tokens.weight": c.tensors["shared.weight"] + 0.1}
        ),
        "tensors", "decoder.embed_tokens.weight", "plus 0.1",
    ),
    "a scale of FP8 that is lost": (
        "llama", lose_scale, "tensors",
        f"{UP}_scale_inv is missing", "",
    ),
    "a quantised matrix that the settings leave out": (
        "llama", ignored, "tensors", UP, "leaves it out",
    ),
    "a scale of activations that is not a number": (
        "llama", lambda c: scale_of_the_cache(c, torch.nan), "tensors",
        "model.layers.1.self_attn.k_scale", "above 0",
    ),
    "scaling of the rotary embedding": (
        "llama", setting(rope_parameters=SCALED), "settings", "rotary.kind", "linear",
    ),
    "epsilon of the norms": (
        "llama", setting(rms_norm_eps=1e-3), "settings", "layernorm_eps", "0.001",
    ),
    "another activation": (
        "llama", setting(hidden_act="relu"), "settings", "activation", "relu",
    ),
    "another class": (
        "llama", setting(architectures=["MistralForCausalLM"]), "settings",
        "architectures", "MistralForCausalLM",
    ),
    "code of its own": (
        "llama", setting(auto_map={"AutoModelForCausalLM": "own.Model"}), "settings",
        "auto_map", "own.Model",
    ),
    "another base for transformers 4": (
        "llama", setting(rope_theta=5e5), "settings", "rope_theta", "500000.0",
    ),
    "biases that are not there": (
        "llama", setting(attention_bias=True), "settings", "attention_bias", "True",
    ),
    "windows by the flag alone": (
        "qwen2", setting(use_sliding_window=True, max_window_layers=0), "settings",
        "use_sliding_window", "True",
    ),
    "fewer heads than there are keys": (
        "llama", setting(num_key_value_heads=4), "settings", "kv_head_num", "4",
    ),
    "a head of its own that is not stored": (
        "gemma", setting(tie_word_embeddings=False), "tensors", "lm_head.weight", "missing",
    ),
    "a length that has another default": (
        "phi3", setting(original_max_position_embeddings=None), "settings",
        "original_max_position_embeddings", "None",
    ),
    "another original length in the table, which one release reads": (
        "phi3", setting("config.json", "rope_parameters", original_max_position_embeddings=20),
        "settings", "original_max_position_embeddings", "20",
    ),
    "a count of rows that has another default": (
        "bert", setting(vocab_size=None), "settings", "vocab_size", "None",
    ),
    "another first token of answers": (
        "t5", setting(decoder_start_token_id=7), "settings",
        "decoder_start_token_id", "7",
    ),
    "a type that no library has": (
        "llama", setting(dtype="float32x"), "settings", "config.json", "float32x",
    ),
    "an activation that no library has": (
        "t5", setting(dense_act_fn="relux"), "settings", "dense_act_fn", "relux",
    ),
    "a shorter longest sequence": (
        "llama", setting(max_position_embeddings=20), "settings",
        "max_position_embeddings", "20",
    ),
    "a stale tokenizer": (
        "llama", stale_tokenizer, "tokenizer", "tokenizer.json", "3 are on one side",
    ),
    "a token before every text": (
        "llama", tokenizer(post_processor=texts_with_tokens("|A", "AB")), "tokenizer",
        "'Hello world'", "[0, ",
    ),
    "a template without the system turn": (
        "llama", without_system_turn, "chats", "system turn", "one sentence",
    ),
    "spaces at an added token": (
        "llama", tokenizer(added={"lstrip": True}), "tokenizer", "a <|endoftext|> b", "ids",
    ),
    "another id of an added token": (
        "llama",
        setting("tokenizer_config.json", added_tokens_decoder={"299": {"content": END}}),
        "tokenizer", END, "299",
    ),
    "another id of an added token in a file of its own": (
        "llama", lambda c: (c.path / "added_tokens.json").write_text(json.dumps({END: 5})),
        "tokenizer", END, "5, and 0",
    ),
    "flags of an added token that one release reads": (
        "llama", OTHER_FLAGS, "tokenizer", f"{END}, special", "False, and True",
    ),
    "flags of an added token whose id is in a file of its own, too": (
        "llama",
        lambda c: (OTHER_FLAGS(c), (c.path / "added_tokens.json").write_text(json.dumps({END: 0}))),
        "tokenizer", f"{END}, special", "False, and True",
    ),
    "a token between two texts": (
        "llama", tokenizer(post_processor=texts_with_tokens("A", "A|B")), "tokenizer",
        "input_ids", "pair",
    ),
    "texts that the tokenizer cannot read": (
        "llama", tokenizer(model=KNOWN_WORDS), "tokenizer", "'Hello world'", "[UNK]",
    ),
    "a length that no text can have": (
        "llama", setting("tokenizer_config.json", model_max_length=[1]), "tokenizer", "folder",
        "cannot load",
    ),
    "another decoder": (
        "llama", tokenizer(decoder={"type": "Fuse"}), "tokenizer", "' leading'", "text of ids",
    ),
    "a padding token": (
        "llama", setting("tokenizer_config.json", pad_token="<|endoftext|>"),
        "tokenizer", "pad_token", "None in the source",
    ),
    "a length at which texts are cut": (
        "llama",
        tokenizer(truncation={
            "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0,
        }),
        "tokenizer", "'Hello world'", "ids",
    ),
    "a template of few turns": (
        "llama",
        template(TEMPLATE.replace("in messages %}", "in messages[-6:] %}")),
        "chats", "many turns", "Question 16",
    ),
    "tools": ("llama", template(TEMPLATE + "{{ tools }}"), "chats", "tools", "weather"),
    "results of tools left out": (
        "llama", template(TEMPLATE.replace(" in messages", " in messages if m.role != 'tool'")),
        "chats", "a call", "18",
    ),
    "thinking switched off": (
        "llama", template(TEMPLATE + "{% if enable_thinking == false %}<think>{% endif %}"),
        "chats", "without thinking", "<think>",
    ),
    "a template for tools": (
        "llama", template_of_tools, "chats", "template tool_use", "some libraries",
    ),
    "a stale template next to the one that is taken": (
        "llama", setting("tokenizer_config.json", chat_template="stale"), "chats",
        "template default", "some libraries",
    ),
    "a template that is a number": (
        "llama", template_of_a_number,
        "chats", "folder", "type int",
    ),
    "no template": ("llama", no_template, "chats", "folder", "no chat template"),
    "documents": ("llama", template(TEMPLATE + "{{ documents }}"), "chats", "documents", "Light"),
    "an end token that one of two files has lost": (
        "llama", setting("generation_config.json", eos_token_id=None), "generation", "folder",
        "lacks [2]",
    ),
    "another end token": (
        "llama", setting("generation_config.json", eos_token_id=7), "generation",
        "folder", "7], and",
    ),
    "another default of sampling": (
        "llama", setting("generation_config.json", temperature=0.2), "generation",
        "temperature", "0.2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named_at_its_place(name, tmp_path, sources):
    family, fault, where, place, said = FAULTS[name]
    source = sources(family)
    copy = copied(source, tmp_path)
    fault(copy)
    if not (copy.path / INDEX).exists():
        copy.save()
    certificate = made(source, copy.path)
    assert certificate.status == "differs", certificate_text(certificate)
    assert certificate.verdict.startswith("differs: ")
    named = [str(each) for each in part(certificate, where).of("differs")]
    hits = [each for each in named if place in each and said in each]
    assert hits, certificate_text(certificate)
    # Nothing else is blamed.
    others = [each.name for each in certificate.parts if each.status == "differs"]
    assert set(others) <= {where, *(["tensors"] if where == "settings" else [])}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModelForCausalLM": "own--model.Model"}),
        ("attention_scale", 3),
        ("quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    ],
)
def test_a_setting_planted_in_a_folder_made_of_shards_is_named(key, value, tmp_path, sources):
    shards = convert_to(sources("llama"), tmp_path / "shards")
    kind = {"output_format": "huggingface", "tp_size": 1}
    copy = Copy(convert_to(shards, tmp_path / "folder", **kind))
    assert made(shards, copy.path).status == "equal"
    copy.setting(**{key: value})
    found = made(shards, copy.path)
    assert found.status == "differs"
    assert key in found.verdict


@pytest.mark.parametrize(
    ("name", "key", "value"), [("opt", "word_embed_proj_dim", 24), ("bert", "type_vocab_size", 3)]
)
def test_a_size_without_a_tensor_of_its_own_that_differs_is_named(
    name, key, value, tmp_path, sources
):
    copy = Copy(shutil.copytree(sources(name), tmp_path / "copy"))
    copy.setting(**{key: value})
    found = made(sources(name), copy.path)
    assert found.status in ("differs", "equal up to")
    assert key in found.verdict


@pytest.mark.parametrize("names", [["LlamaModel"], ["LlamaForSequenceClassification"], []])
def test_a_class_that_is_not_that_of_the_model_is_named_whatever_the_source(
    names, tmp_path, sources
):
    shards = convert_to(sources("llama"), tmp_path / "shards")
    kind = {"output_format": "huggingface", "tp_size": 1}
    copy = Copy(convert_to(shards, tmp_path / "folder", **kind))
    copy.setting(architectures=names)
    found = made(shards, copy.path)
    assert (found.status, "architectures" in found.verdict) == ("differs", True)


def test_code_in_a_folder_of_another_kind_than_its_source_is_named(tmp_path, sources):
    copy = Copy(convert_to(sources("llama"), tmp_path, output_format="huggingface", tp_size=1))
    copy.setting(
        model_type="mistral", sliding_window=None, architectures=["MistralForCausalLM"],
        auto_map={"AutoModelForCausalLM": "own--model.Model"},
    )  # fmt: skip
    assert "auto_map" in made(sources("llama"), copy.path).verdict


# fault -> the rows that are named; a calibration hides small errors of few values.
FAULTS_OF_4_BITS: Sequence[tuple[dict[str, Any], str]] = (
    ({"factor": 1.05}, "rows 5-5, "),
    ({"factor": 1.25}, "rows 5-5, "),
    ({"offset": 1}, "rows 0-"),
    ({"whole": 16 / 15}, "rows 0-"),
    ({"factor": 1.25, "calibrate": True}, "rows 5-5, "),
    ({"factor": 0.8, "calibrate": True}, "rows 5-5, "),
    ({"offset": 1, "calibrate": True}, "rows 0-"),
    ({"whole": 1.04, "calibrate": True}, "rows 0-"),
)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weights_of_4_bits_are_held_to_their_rounding(method, tmp_path):
    source = write_model("llama", tmp_path / "source", hidden_size=128, intermediate_size=256,
                         head_dim=32)  # fmt: skip
    for calibrate, state in ((False, "dequantised"), (True, "calibrated")):
        copy = Copy(shutil.copytree(source, tmp_path / state))
        in_4_bits(copy, method, calibrate=calibrate)
        copy.save()
        certificate = made(source, copy.path, layers=not calibrate)
        assert certificate.status == "equal up to", certificate_text(certificate)
        states = {row["state"] for row in part(certificate, "tensors").rows}
        assert states == {"equal", state}
        if not calibrate:
            assert "(of its widened weights)" in part(certificate, "layers").compared
    for number, (fault, rows) in enumerate(FAULTS_OF_4_BITS):
        copy = Copy(shutil.copytree(source, tmp_path / str(number)))
        in_4_bits(copy, method, **fault)
        copy.save()
        (found,) = part(made(source, copy.path), "tensors").of("differs")
        assert (found.where, rows in found.detail) == (UP, True), (fault, found)


def test_a_quantisation_that_is_not_read_is_no_difference(copy, sources):
    for key in [key for key in copy.tensors if key.endswith("_proj.weight")]:
        copy.tensors[f"{key.removesuffix('weight')}qweight"] = copy.tensors.pop(key).int()
    copy.save()
    copy.setting(quantization_config={"quant_method": "awq", "bits": 3})
    certificate = made(sources("llama"), copy.path)
    assert certificate.status == "not computed", certificate_text(certificate)


def in_8_bits(copy: Copy, move: int = 0) -> None:
    """Round as llm-compressor's W8A8 does, in bf16; `move` some integers, as calibration does."""
    for key in [key for key in copy.tensors if key.endswith("_proj.weight")]:
        wide = copy.tensors[key].bfloat16()
        scale = wide.abs().amax(1, keepdim=True) * 2 / 255
        rounded = (wide / scale).round()
        rounded[:, ::7] += move
        copy.tensors[key] = rounded.clamp(-128, 127).to(torch.int8)
        copy.tensors[f"{key}_scale"] = scale
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": weights}
    copy.setting(quantization_config={
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": scheme},
    })  # fmt: skip
    copy.save()


@pytest.mark.parametrize(
    ("move", "words"),
    [(0, "the rounding of quantised weights"), (1, "what calibration moves in quantised weights")],
)
def test_integers_that_a_program_rounds_in_bf16_pass(move, words, copy, sources):
    in_8_bits(copy, move)
    assert f"equal up to {words} (" in made(sources("llama"), copy.path).verdict
    copy.tensors["model.layers.0.mlp.up_proj.weight_scale"][3] *= 1.1
    copy.save()
    (found,) = part(made(sources("llama"), copy.path), "tensors").of("differs")
    assert (found.where, "rows 3-3, " in found.detail) == (
        "model.layers.0.mlp.up_proj.weight", True,
    )  # fmt: skip


def test_packed_values_of_another_shape_are_not_compared(copy, sources):
    key = "model.layers.0.mlp.up_proj.weight"
    count = copy.tensors[key].numel() // 2
    copy.tensors[key] = torch.zeros(count, 1, dtype=torch.uint8)
    copy.save()
    copy.setting(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    certificate = made(sources("llama"), copy.path)
    assert certificate.status == "not computed", certificate_text(certificate)


def test_values_of_a_type_that_is_not_read_are_refused(copy, sources):
    copy.tensors["model.norm.weight"] = torch.zeros(4, dtype=torch.uint32)
    copy.save()
    with pytest.raises(ValueError, match="stored as U32"):
        made(sources("llama"), copy.path)


def test_a_bias_of_zeros_is_the_same_function(copy, tmp_path, sources):
    copy.tensors["model.norm.weight"] = copy.tensors["model.norm.weight"].double()
    shutil.copytree(copy.path, other := tmp_path / "other")
    matrices = [key for key in copy.tensors if ".self_attn." in key]
    biases = {key.replace("weight", "bias"): len(copy.tensors[key]) for key in matrices}
    copy.tensors |= {key: torch.zeros(size) for key, size in biases.items()}
    copy.save()
    copy.setting(attention_bias=True)
    for source, folder in ((other, copy.path), (copy.path, other)):
        found = part(made(source, folder), "tensors")
        assert {each.where: each.kind for each in found.findings} == dict.fromkeys(biases, "zero")
    copy.tensors[next(iter(biases))] += 1
    copy.save()
    for source, folder in ((other, copy.path), (copy.path, other)):
        assert len(part(made(source, folder), "tensors").of("differs")) == 1


def test_buffers_of_integers_are_compared_by_name(tmp_path):
    for name, first in (("source", 0), ("same", 0), ("other", 1)):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text('{"model_type": "unknown"}')
        tensors = {"w": torch.ones(2, 2), "ids": torch.arange(first, first + 4)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    same, other = (part(made(tmp_path / "source", tmp_path / name), "tensors")
                   for name in ("same", "other"))  # fmt: skip
    assert (same.status, [each.where for each in other.of("differs")]) == ("equal", ["ids"])


def test_a_lost_tokenizer_is_named_without_the_place_of_a_copy(copy, sources):
    for each in copy.path.glob("tokenizer*"):
        each.unlink()
    (found,) = part(made(sources("llama"), copy.path), "tokenizer").of("differs")
    assert found.detail.startswith("it holds no tokenizer; ")


def test_values_that_are_no_numbers_are_equal_to_themselves(tmp_path, sources):
    source = Copy(shutil.copytree(sources("llama"), tmp_path / "source"))
    source.tensors[UP][0, :2] = torch.tensor([torch.nan, 0.0])
    source.save()
    copy = copied(source.path, tmp_path)
    copy.tensors[UP][0, 1] = -0.0
    copy.save()
    certificate = made(source.path, copy.path, layers=True)
    layers = part(certificate, "layers")
    assert certificate.status == layers.status == "equal up to", certificate_text(certificate)
    assert [each.where for each in layers.findings] == ["layer 1"]


def test_another_file_of_the_vocabulary_is_not_called_equal(tmp_path, sources):
    source, folder = (
        shutil.copytree(sources("llama"), tmp_path / name) for name in ("source", "folder")
    )
    (source / "vocab.json").write_text('{"a": 1}')
    (folder / "vocab.json").write_text('{"a":1}')
    assert made(source, folder).status == "equal"
    (folder / "vocab.json").write_text('{"a": 2}')
    (found,) = part(made(source, folder), "tokenizer").of("not computed")
    assert found.where == "vocab.json"
    (source / "vocab.json").unlink()
    (folder / "vocab.json").write_text('{"<|endoftext|>": 0}')
    assert "another wording of the tokenizer (vocab.json)" in made(source, folder).verdict


@pytest.mark.parametrize(
    ("model", "key"), [("gemma3", "sliding_window_pattern"), ("llama", "rotary_emb_base")]
)
def test_a_spelling_of_another_release_is_a_bound(model, key, tmp_path):
    source = write_model(model, tmp_path / "source")
    copy = copied(source, tmp_path)
    settings: dict[str, Any] = {key: 2}
    copy.setting(**settings)
    assert key in made(source, copy.path).verdict


def test_first_names_of_norms_are_those_of_today(tmp_path):
    source = write_model("bert", tmp_path / "source")
    copy = copied(source, tmp_path)
    for today, first in (("weight", "gamma"), ("bias", "beta")):
        copy.tensors = {
            key.replace(f"LayerNorm.{today}", f"LayerNorm.{first}"): value
            for key, value in copy.tensors.items()
        }
    copy.save()
    assert made(source, copy.path).status == made(copy.path, source).status == "equal"


def test_names_of_a_model_in_memory_may_be_those_of_files_and_index(tmp_path):
    source = write_model("qwen3-moe", tmp_path / "source")
    copy = copied(source, tmp_path)
    copy.tensors = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    copy.save()
    copy.sharded()
    certificate = made(source, copy.path)
    assert certificate.status == "equal", certificate_text(certificate)


# Two neighbours among the experts of dots1 are a group.
@pytest.mark.parametrize(
    ("name", "order", "is_same"),
    [
        ("qwen3-moe", [3, 1, 0, 2, 5, 4], True),
        ("ernie4_5-moe", [3, 1, 0, 2, 5, 4], True),
        ("gpt-oss", [3, 1, 0, 2, 5, 4], True),
        ("granitemoe", [3, 1, 0, 2, 5, 4], True),
        ("dots1", [5, 4, 2, 3, 0, 1, 7, 6], True),
        ("dots1", [0, 2, 1, 3, 4, 5, 6, 7], False),
    ],
)
def test_experts_in_another_order_with_their_router_are_the_same_function(
    name, order, is_same, tmp_path
):
    source = write_model(name, tmp_path / "source", num_hidden_layers=4)
    copy = copied(source, tmp_path)
    reorder_experts(copy, order)
    copy.save()
    certificate = made(source, copy.path, layers=is_same)
    assert (certificate.status == "equal up to") is is_same, certificate_text(certificate)
    assert ("equal up to the order of experts" in certificate.verdict) is is_same
    for key in [key for key in copy.tensors if ".3." in key and "norm" in key][:1]:
        copy.tensors[key] = copy.tensors[key] + 1
    copy.save()
    assert made(source, copy.path).status == "differs"
    reorder_experts(copy, [*range(1, len(order)), 0])
    router = next(key for key in copy.tensors if re.search(r"\.3\..*(gate|router.*)\.weight", key))
    copy.tensors[router] = load_file(source / "model.safetensors")[router]
    copy.save()
    named = [each.where for each in part(made(source, copy.path), "tensors").of("differs")]
    assert any("expert" in each or "linear" in each for each in named)


def test_rounding_may_choose_other_experts(tmp_path):
    source = write_model("ernie4_5-moe", tmp_path / "source", vocab_size=300)
    copy = copied(source, tmp_path)
    in_bf16(copy)
    copy.save()
    certificate = made(source, copy.path, layers=True)
    assert certificate.status == "equal up to", certificate_text(certificate)
    assert max(row["relative"] for row in part(certificate, "layers").rows) > 8e-2


def test_two_spellings_of_a_setting_are_one(tmp_path, sources):
    source, copy = sources("llama"), copied(sources("llama"), tmp_path)
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    copy.setting(rope_parameters=None, rope_theta=rope["rope_theta"], torch_dtype="float32",
                 dtype=None)  # fmt: skip
    assert made(source, copy.path).status == "equal"
    copy.setting(rope_parameters=rope, rope_theta=5e5)
    (found,) = part(made(source, copy.path), "settings").of("differs")
    assert found.where == "rope_theta"


def test_a_parameter_of_yarn_may_be_stated_as_it_is_by_default(tmp_path):
    source = write_source("llama-yarn", tmp_path / "source")
    copy = copied(source, tmp_path)
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    assert "truncate" not in rope
    copy.setting(rope_parameters={**rope, "truncate": True})
    assert made(source, copy.path).status == "equal"
    copy.setting(rope_parameters={**rope, "truncate": False})
    found = part(made(source, copy.path), "settings").of("differs")
    assert "rotary.scaling.truncate" in [each.where for each in found]


def test_rows_that_no_model_reads_may_be_the_sources(tmp_path):
    source = write_model("opt", tmp_path / "source")
    copy = Copy(source)
    copy.tensors["model.decoder.embed_positions.weight"][:2] = 0.5
    copy.save()
    assert made(source, shutil.copytree(source, tmp_path / "folder")).status == "equal"


def test_a_prefix_of_all_names_and_a_file_of_known_tokens_may_be_left_out(tmp_path):
    source = write_model("gpt2", tmp_path / "source")
    copy = copied(source, tmp_path)
    (copy.path / "generation_config.json").unlink()
    copy.tensors = {key.removeprefix("transformer."): each for key, each in copy.tensors.items()}
    copy.save()
    for sides in ((source, copy.path), (copy.path, source)):
        certificate = made(*sides)
        assert certificate.status == "equal", certificate_text(certificate)


def test_models_without_end_tokens_are_compared(tmp_path):
    source = write_model("qwen2", tmp_path / "source")
    Copy(source).setting(bos_token_id=None, eos_token_id=None)
    (source / "generation_config.json").unlink()
    certificate = made(source, shutil.copytree(source, tmp_path / "folder"))
    assert certificate.status == "equal", certificate_text(certificate)


def stale_shards(copy: Copy) -> None:
    copy.save()
    stale = {key: value + 1 for key, value in copy.tensors.items()}
    save_file(stale, copy.path / "model-1-of-1.safetensors", {"format": "pt"})


def test_weights_of_a_method_that_transformers_does_not_know_are_widened(copy, sources):
    for key in [key for key in copy.tensors if key.endswith("_proj.weight")]:
        scale = copy.tensors[key].abs().max() / 448
        copy.tensors[key] = (copy.tensors[key] / scale).to(torch.float8_e4m3fn)
        copy.tensors[f"{key}_scale"] = scale
    copy.save()
    copy.setting(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    certificate = made(sources("llama"), copy.path, layers=True)
    assert certificate.status == "equal up to", certificate_text(certificate)
    assert "(of its widened weights)" in part(certificate, "layers").compared


def unknown_quantisation(copy: Copy) -> None:
    fp8(copy, off=False)
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "rotation": "hadamard"}
    copy.setting(quantization_config=settings)


def test_an_adapter_that_libraries_add_to_the_source_is_not_passed_over(copy, sources):
    save_file({"lora_A.weight": torch.ones(2, 2)}, copy.path / "adapter_model.safetensors")
    (found,) = part(made(copy.path, sources("llama")), "tensors").of("not computed")
    assert found.where == "adapter_model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_was_merged_is_certified_with_its_source(dtype, sources, tmp_path):
    source, adapter, folder = sources("llama"), tmp_path / "adapter", tmp_path / "folder"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(str(adapter))
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    whole = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    whole.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    assert made(source, folder).status == "differs"
    found = made(source, folder, layers=True, lora=[str(adapter)])
    assert found.status == ("equal" if dtype == torch.float32 else "equal up to"), found.verdict
    assert "PEFT" in part(found, "layers").compared
    copy = Copy(folder)
    copy.tensors[QUERY] = load_file(source / "model.safetensors")[QUERY].to(dtype)
    copy.save()
    found = made(source, folder, lora=[str(adapter)])
    (remark,) = part(found, "tensors").of("differs")
    assert (remark.where, remark.kind) == (QUERY, "changed")
    assert "a merged adapter" in remark.detail


def test_a_token_that_one_release_states_is_a_bound(copy, sources):
    copy.setting(eod_token_id=3)
    certificate = made(sources("llama"), copy.path)
    assert (certificate.status, "(eod_token_id)" in certificate.verdict) == ("equal up to", True)


def test_a_setting_that_the_folder_lost_is_named(copy, sources):
    copy.setting(scale_of_tomorrow=3.0)
    found = part(made(copy.path, sources("llama")), "settings").of("differs")
    assert [each.where for each in found] == ["scale_of_tomorrow"]


def test_defaults_of_generation_that_the_source_lacks_are_named(tmp_path, sources):
    source, folder = (
        shutil.copytree(sources("llama"), tmp_path / name) for name in ("source", "folder")
    )
    (source / "generation_config.json").unlink()
    Copy(folder).setting("generation_config.json", suppress_tokens=[4])
    found = part(made(source, folder), "generation").of("differs")
    assert [each.where for each in found] == ["suppress_tokens"]


def test_every_key_of_config_json_that_differs_is_on_the_page(copy, sources):
    copy.setting(use_cache=False, _name_or_path="elsewhere")
    certificate = made(sources("llama"), copy.path)
    assert certificate.status == "equal"
    _, page = write_certificate(certificate)
    for key in ("use_cache", "_name_or_path"):
        assert f'<td class="where">{key}<td class="equal">' in page.read_text()


def test_another_scheme_of_quantised_activations_is_a_bound(tmp_path, sources):
    source = Copy(shutil.copytree(sources("llama"), tmp_path / "source"))
    fp8(source, off=False)
    source.save()
    copy = copied(source.path, tmp_path)
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"}
    copy.setting(quantization_config=settings)
    assert "(quantization_config.activation_scheme)" in made(source.path, copy.path).verdict


def other_vocabulary(copy: Copy) -> None:
    (copy.path / "tekken.json").write_text("{}")


def test_a_vocabulary_that_no_library_here_reads_is_not_lost_in_silence(tmp_path, sources):
    source, folder = (
        shutil.copytree(sources("llama"), tmp_path / name) for name in ("source", "folder")
    )
    for side in (source, folder):
        for file in side.glob("tokenizer*"):
            file.unlink()
        (side / "tiktoken.model").write_text("YQ== 0")
    assert made(source, folder).status == "equal"
    (folder / "tiktoken.model").write_text("YQ== 1")
    assert made(source, folder).status == "not computed"
    (folder / "tiktoken.model").unlink()
    (found,) = part(made(source, folder), "tensors").of("differs")
    assert (found.where, found.kind) == ("tiktoken.model", "missing")


# fault -> where something is named that nothing here can compare
UNCOMPARED: Mapping[Callable[[Copy], None], str] = {
    stale_shards: "model-1-of-1.safetensors",
    other_vocabulary: "tekken.json",
    scale_of_the_cache: "model.layers.1.self_attn.k_scale",
    unknown_quantisation: "quantization_config",
}


@pytest.mark.parametrize("fault", UNCOMPARED)
def test_what_cannot_be_compared_is_not_called_equal(fault, copy, sources):
    fault(copy)
    copy.save()
    certificate = made(sources("llama"), copy.path)
    assert certificate.status == "not computed", certificate_text(certificate)
    (found,) = part(certificate, "tensors").of("not computed")
    assert found.where == UNCOMPARED[fault]


def in_bf16(copy: Copy) -> None:
    copy.tensors = {key: value.bfloat16() for key, value in copy.tensors.items()}


def truncated_to_bf16(copy: Copy) -> None:
    for key, value in copy.tensors.items():
        bits = value.contiguous().view(torch.int32) & -0x10000
        copy.tensors[key] = bits.view(torch.float32).bfloat16()


def short_index(copy: Copy) -> None:
    copy.save()
    copy.sharded()
    (copy.path / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {NORM: "model-1.safetensors"}})
    )


# name -> what is done to a copy, and up to what it is equal
SOUND: Mapping[str, tuple[Callable[[Copy], object], str]] = {
    "a copy": (lambda _: None, ""),
    "rounded": (in_bf16, "rounding to bf16"),
    "truncated": (truncated_to_bf16, "one unit in the last place of bf16"),
    "padded": (padded(0.0), "padding rows of zeros"),
    "defaults of generation": (
        setting("generation_config.json", temperature=1.0, num_beams=1, min_length=0),
        "",
    ),
    "not all in the index": (short_index, "what is listed"),
    "an end token of one file alone": (setting(eos_token_id=0), "(config.json, eos_token_id)"),
    "another class of the tokenizer": (
        setting("tokenizer_config.json", tokenizer_class="LlamaTokenizer"), "tokenizer_class)",
    ),
    "in another type by default": (setting(dtype="float16"), "(dtype)"),
    "another normalizer, which no probe shows": (
        tokenizer(normalizer={"type": "Replace", "pattern": {"String": "qz"}, "content": "q"}),
        "tokenizer.json, normalizer",
    ),
    "quantised": (lambda c: fp8(c, off=False), "the rounding of quantised weights"),
    "with a file of another program": (
        lambda c: (c.path / "chat_template.json").write_text("{}"), "(chat_template.json)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_foreign_folder_passes(name, tmp_path, sources):
    source, (change, bound) = sources("llama"), SOUND[name]
    copy = copied(source, tmp_path)
    change(copy)
    if not (copy.path / INDEX).exists():
        copy.save()
    certificate = made(source, copy.path, layers=name != "quantised")
    assert certificate.status in ("equal", "equal up to"), certificate_text(certificate)
    assert bound in certificate.verdict


# Models whose modules are those of another that is tried: Llama's, Falcon's, GPT-NeoX's, T5's.
ALIKE = (
    "mistral", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "starcoder2", "nemotron",
    "stablelm", "cohere", "falcon", "falcon-bias", "falcon-one-norm", "falcon-sequential", "gemma",
    "gemma2", "seed-oss", "arcee", "ministral", "ernie4_5", "glm", "olmo3", "hunyuan",
    "ministral3", "exaone3", "internlm3", "iquestcoder", "cwm", "helium", "hyperclovax",
    "vaultgemma", "jais2", "codegen", "gptneox-sequential", "mt5",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE))
        for name in (*MODELS, *MIXTURES)
    ],
)
def test_every_family_equals_its_source_in_every_layer_and_each_lost_tensor_is_named(
    name, tmp_path
):
    source = write_model(name, tmp_path / "source")
    fields = {}
    if name in MIXTURES:
        fields = {"output_format": "huggingface", "tp_size": 1}
    certificate = made(source, convert_to(source, tmp_path, **fields), layers=True)
    assert certificate.status in ("equal", "equal up to"), certificate_text(certificate)
    assert part(certificate, "tensors").status == "equal"
    rows = part(certificate, "layers").rows
    # Two orders of magnitude below the tolerance: both compute in fp32.
    assert max(row["relative"] for row in rows) < 1e-5
    places = {row["place"] for row in rows}
    stacks = {"t5": ["encoder ", "decoder "], "mt5": ["encoder ", "decoder "]}
    stacks["t5-encoder"] = ["encoder "]
    for stack in stacks.get(name, [""]):
        assert {f"{stack}embedding", f"{stack}layer 0"} <= places
    assert ("output" if name in ("bert", "t5-encoder") else "logits") in places
    copy = copied(source, tmp_path)
    kept = min(copy.tensors)
    lost = copy.tensors.keys() - {kept}
    copy.tensors = {kept: copy.tensors[kept]}
    copy.save()
    named = {each.where for each in part(made(source, copy.path), "tensors").of("differs")}
    assert lost <= named
    assert kept not in named


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_rounding_of_a_type_is_within_its_tolerance(name, kind, tmp_path):
    source = write_model(name, tmp_path / "source")
    folder = convert_to(source, tmp_path, weight_data_type=kind)
    certificate = made(source, folder, layers=True)
    assert certificate.status == "equal up to", certificate_text(certificate)
    assert f"rounding to {kind}" in certificate.verdict
    # It does round: the tolerance of fp32 would not hold.
    assert made(source, folder, layers=True, tolerance=1e-6).status == "differs"


def damage(file: Path, place: int = 0) -> None:
    """Change one value of an fp32 file, as a bad disk or copy would."""
    values = np.fromfile(file, np.float32)
    values[place] += 3
    values.tofile(file)


# family, damaged file, value -> first layer that differs
DAMAGES = {
    "qkv bias of one rank": (
        "gpt2", "model.layers.1.attention.query_key_value.bias.1.bin", 30, "layer 1"
    ),
    "output bias, which no rank shares": (
        "gpt2", "model.layers.1.mlp.dense_4h_to_h.bias.bin", 7, "layer 1"
    ),
    "embedding": ("gpt2", "model.wte.bin", 5 * 24, "embedding"),
    "final norm": ("gpt2", "model.final_layernorm.bias.bin", 0, "logits"),
    "head": ("llama", "model.lm_head.weight.bin", 0, "logits"),
    "summed biases of a parallel layer": (
        "gptneox-parallel", "model.layers.1.mlp.attention.bias.sum.bin", 4, "layer 1"
    ),
    "cross-attention of one rank": (
        "t5", "decoder.block.2.layer.1.EncDecAttention.v.weight.1.bin", 2,
        "decoder layer 2",
    ),
    "norm of BERT": (
        "bert", "model.encoder.layer.0.output.LayerNorm.weight.bin", 1, "layer 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGES)
def test_damaged_shard_is_named_with_the_first_layer_that_differs(damaged, tmp_path):
    family, name, value, place = DAMAGES[damaged]
    source = write_model(family, tmp_path / "source")
    folder = convert_to(source, tmp_path)
    damage(folder / name, value)
    certificate = made(source, folder, layers=True)
    (tensor,) = part(certificate, "tensors").of("differs")
    assert (tensor.where, "1 of" in tensor.detail) == (name, True)
    (layer,) = part(certificate, "layers").of("differs")
    assert layer.where == place


def change_setting(folder: Path, key: str, value: str) -> None:
    ini = folder / "config.ini"
    text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", ini.read_text())
    assert count == 1
    ini.write_text(text)
    (folder.parent / f"{folder.name}.manifest.json").unlink()


def test_defaults_of_generation_that_a_format_lacks_are_not_computed(tmp_path):
    source = write_nemo(tmp_path / "gpt.nemo")
    folder = convert_to(source, tmp_path, tp_size=1, output_format="huggingface", allow=("*",))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    generation = part(made(source, folder), "generation")
    assert generation.status == "not computed"
    assert "temperature" in [each.where for each in generation.findings]


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=["whole", "of 4 training ranks"])
def test_what_could_not_be_computed_is_never_called_equal(layout, tmp_path, capsys):
    source = write_nemo(tmp_path / "gpt.nemo", **layout)
    folder = convert_to(source, tmp_path)
    words = [str(source), str(folder), "--set", "start_id=1", "--set", "end_id=2"]
    assert main([*words, "--endpoint", "http://127.0.0.1:9"]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("equal")
    assert "not computed: " in first
    assert "served" in first
    change_setting(folder, "layernorm_eps", "0.5")
    assert main(words) == 1
    assert "layernorm_eps: setting: 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["fastertransformer", "huggingface"])
def test_a_source_whose_library_is_not_run_is_computed_by_transformers(output, tmp_path):
    source = write_nemo(tmp_path / "gpt.nemo")
    folder = convert_to(source, tmp_path, tp_size=1, output_format=output, allow=("*",))
    layers = part(made(source, folder, layers=True), "layers")
    assert layers.status in ("equal", "equal up to"), layers
    assert "of a folder made of this nemo" in layers.compared
    if output == "fastertransformer":
        damage(folder / "model.layers.3.mlp.dense_h_to_4h.weight.0.bin", 9)
        (layer,) = part(made(source, folder, layers=True), "layers").of("differs")
        assert layer.where == "layer 3"


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("gpt_tp2", "huggingface"),
        ("llama_tp2", "fastertransformer"),
        pytest.param("gpt_tp2", "fastertransformer", marks=pytest.mark.long),
        pytest.param("llama_tp2", "huggingface", marks=pytest.mark.long),
    ],
)
def test_megatron_core_checkpoint_is_computed_by_its_own_library(name, output, shared, tmp_path):
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is missing: pip install 'megatron-core>=0.12'")
    source = shared / "golden" / "gpt_mcore" / name / "source" / "model.nemo"
    ranks = 1 if output == "huggingface" else 2
    folder = convert_to(source, tmp_path, output_format=output, tp_size=ranks, allow=("*",))
    layers = part(made(source, folder, layers=True), "layers")
    assert layers.status == "equal up to", layers
    assert ("megatron-core" in layers.compared, len(layers.rows)) == (True, 4)
    assert max(row["relative"] for row in layers.rows) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"bias_activation_fusion": True},
        {"bias_activation_fusion": False},
        {"bias_activation_fusion": False, "openai_gelu": True},
    ],
    ids=["fused", "by erf", "OpenAI's"],
)
def test_gated_gelu_has_the_form_that_megatron_core_computes(settings, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install 'megatron-core>=0.12'")
    torch.manual_seed(0)
    source = write_core(tmp_path / "model.nemo", core_state(), activation="geglu", **settings)
    rows = part(made(source, convert_to(source, tmp_path), layers=True), "layers").rows
    # Sums in another order; the other form of gelu is some 1e-4 away.
    assert max(row["relative"] for row in rows) < 1e-5


@pytest.mark.parametrize(
    ("changes", "is_computed"),
    [
        ({"activation": "squared-relu"}, True),
        ({"no_rope_freq": [0, 1], "softmax_scale": 0.2}, True),
        ({"qk_layernorm": True}, True),
        ({"window_size": [4, 0]}, False),
        ({"attn_logit_softcapping": 4.0}, False),
        ({"apply_embedding_scaling": True}, False),
    ],
    ids=str,
)
def test_traits_of_megatron_core_are_computed_or_named(changes, is_computed, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install 'megatron-core>=0.12'")
    torch.manual_seed(0)
    state = core_state()
    for layer in range(2):
        attention = f"model.decoder.layers.{layer}.self_attention."
        if "activation" in changes:
            name = f"model.decoder.layers.{layer}.mlp.linear_fc1.weight"
            state[name] = state[name][:56].clone()
        if "qk_layernorm" in changes:
            state |= {f"{attention}{part}_layernorm.weight": torch.randn(8) for part in "qk"}
    source = write_core(tmp_path / "model.nemo", state, **changes)
    folder = convert_to(source, tmp_path, output_format="fastertransformer", tp_size=1)
    layers = part(made(source, folder, layers=True), "layers")
    assert bool(layers.rows) is is_computed, layers
    if is_computed:
        assert max(row["relative"] for row in layers.rows) < 1e-5
    else:
        assert any("not computed with" in each.detail for each in layers.findings)


def test_experts_of_megatron_core_are_named_where_they_are_not_computed(tmp_path):
    pytest.importorskip("megatron.core", reason="pip install 'megatron-core>=0.12'")
    folder = write_model("mixtral", tmp_path / "folder")
    source = convert_to(folder, tmp_path, output_format="torch_dist", tp_size=1)
    certificate = made(source, folder, layers=True)
    assert part(certificate, "tensors").status == "equal"
    (layers,) = part(certificate, "layers").of("not computed")
    assert "expert_num = 4" in layers.detail


def test_a_text_model_is_compared_with_the_whole(tmp_path):
    source = write_whole("qwen2_5_vl", tmp_path / "source")
    copy = Copy(convert_to(source, tmp_path, output_format="huggingface", tp_size=1))
    certificate = made(source, copy.path, layers=True)
    assert certificate.status == "equal up to", certificate_text(certificate)
    assert [each.where for each in part(certificate, "tensors").findings] == ["images"]
    layers = part(certificate, "layers")
    assert "Qwen2_5_VLForConditionalGeneration" in layers.compared
    assert [row["place"] for row in layers.rows][-1] == "logits"
    copy.tensors["model.layers.1.input_layernorm.weight"][2] = 5
    copy.save()
    certificate = made(source, copy.path, layers=True)
    assert [each.where for each in part(certificate, "layers").of("differs")] == ["layer 1"]


def test_release_of_mesh_transformer_jax_equals_transformers(shared, tmp_path):
    source = shared / "golden/gptj_slim/tiny/source"
    given = (("head_num", "4"), ("rotary_embedding", "2"))
    folder = convert_to(source, tmp_path, given=given)
    layers = part(made(source, folder, layers=True, given=given), "layers")
    assert "GPTJForCausalLM (of a folder made of this jax)" in layers.compared
    assert max(row["relative"] for row in layers.rows) < 1e-5


@pytest.mark.parametrize(
    ("case", "tensors", "added", "products"),
    [("gptneox/parallel_residual", 30, 0, 0), ("t5/v1_1_gated_gelu_untied", 60, 0, 0),
     ("opt/post_ln_projected", 27, 0, 2), ("t5_nemo/linear_adapter", 84, 32, 0)],
)  # fmt: skip
def test_folders_of_nvidias_converters_hold_the_same_tensors(
    shared, tmp_path, case, tensors, added, products
):
    """Tables that are products of two tensors may be rounded otherwise on another processor."""
    golden = shared / "golden" / case
    source = golden / json.loads((golden / "case.json").read_text())["source"]
    found = part(made(source, unpack_case(golden, tmp_path, tp_size=1)), "tensors")
    states = [row["state"] for row in found.rows]
    assert states.count("one step") in (0, products)
    assert states.count("equal") + states.count("one step") == tensors, found.findings
    assert states.count("not comparable") == added
    assert not found.of("differs")


def test_a_model_of_no_known_family_is_compared_by_its_names(tmp_path):
    import transformers

    config = transformers.PersimmonConfig(
        vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=56, max_position_embeddings=40,
    )  # fmt: skip
    source = tmp_path / "source"
    transformers.PersimmonForCausalLM(config).save_pretrained(source)
    copy = copied(source, tmp_path)
    copy.setting(hidden_act=None)  # the library's default, as it was
    certificate = made(source, copy.path, layers=True)
    assert certificate.status in ("equal", "equal up to"), certificate_text(certificate)
    assert [row["place"] for row in part(certificate, "layers").rows][-1] == "logits"
    copy.tensors["model.layers.1.input_layernorm.weight"][2] = 5
    copy.save()
    copy.setting(qk_layernorm=False)
    certificate = made(source, copy.path, layers=True)
    (tensor,) = part(certificate, "tensors").of("differs")
    assert tensor.where == "model.layers.1.input_layernorm.weight"
    assert [each.where for each in part(certificate, "settings").of("differs")] == ["qk_layernorm"]
    assert part(certificate, "layers").of("differs")[0].where == "layer 0"


@pytest.mark.parametrize(
    ("key", "value"), [("tie_word_embeddings", False), ("vocab_size", 54), ("pad_token_id", 2)]
)
def test_a_model_of_no_known_family_is_held_to_its_settings(key, value, tmp_path):
    import transformers

    config = transformers.XGLMConfig(
        vocab_size=53, d_model=24, attention_heads=4, num_layers=1, ffn_dim=56
    )
    source = tmp_path / "source"
    transformers.XGLMForCausalLM(config).save_pretrained(source)
    copy = copied(source, tmp_path)
    copy.setting(**{key: value})
    found = part(made(source, copy.path), "settings").of("differs")
    assert [each.where for each in found] == [key]
    del copy.tensors["model.embed_tokens.weight"]
    copy.save()
    found = part(made(source, copy.path), "tensors").of("differs")
    assert [each.where for each in found] == ["model.embed_tokens.weight"]


def test_images_of_a_model_are_not_called_equal(tmp_path):
    source = write_whole("mistral3", tmp_path / "source")
    found = part(made(source, shutil.copytree(source, tmp_path / "folder")), "tensors")
    assert [each.where for each in found.of("not computed")] == ["images"]


def test_a_run_goes_on_where_it_was(tmp_path, sources):
    source = sources("llama")
    folder = shutil.copytree(source, tmp_path / "folder")
    made(source, folder)
    state = tmp_path / "certificate" / "certify.jsonl"
    lines = state.read_text().splitlines()
    row = json.loads(lines[1])
    # A record of an earlier run is taken as it is, and the rest is computed.
    state.write_text("\n".join([lines[0], json.dumps({**row, "state": "changed"})]) + "\n")
    again = made(source, folder)
    assert [each.where for each in part(again, "tensors").of("differs")] == [row["key"]]
    (folder / "config.json").touch()
    assert made(source, folder).status == "equal"


def test_a_run_begins_anew_where_a_file_was_changed_and_its_time_restored(tmp_path, sources):
    source = sources("llama")
    copy = copied(source, tmp_path)
    copy.tensors["model.layers.2.unused"] = torch.zeros(1 << 17)
    copy.save()
    one = made(source, copy.path)
    file = copy.path / "model.safetensors"
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert made(source, copy.path).table()["folder"]["files"] != one.table()["folder"]["files"]


def test_certificate_is_written_signed_and_verified(tmp_path, sources, capsys):
    source = sources("llama")
    folder = shutil.copytree(source, tmp_path / "folder")
    key, output = tmp_path / "key", tmp_path / "out"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    words = [str(source), str(folder), "--no-layers", "--output", str(output)]
    assert main([*words, "--key", str(key)]) == 0
    table = json.loads((output / "certificate.json").read_text())
    assert next(iter(table)) == "verdict"
    assert capsys.readouterr().out.splitlines()[0] == table["verdict"] == "equal"
    assert table["source"]["sha256"] == table["folder"]["sha256"]
    assert table["card"].startswith("**Certificate**")
    page = (output / "certificate.html").read_text()
    assert '<h1 class="equal">equal</h1>' in page
    allowed = tmp_path / "allowed"
    allowed.write_text(f"me {key.with_suffix('.pub').read_text()}")
    check = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", "me", "-n",
             "slipway-certificate", "-s", str(output / "certificate.json.sig")]  # fmt: skip
    data = (output / "certificate.json").read_bytes()
    assert subprocess.run(check, input=data, capture_output=True, check=False).returncode == 0
    assert subprocess.run(check, input=data + b" ", capture_output=True, check=False).returncode
    assert main(words) == 0
    assert not (output / "certificate.json.sig").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "{folder}"], "nowhere does not exist"),
        (["{source}", "nowhere"], "holds neither config.json nor config.ini"),
        (["{source}", "{folder}", "--set", "head_num"], "--set head_num is not KEY=VALUE"),
        (["{other}", "{folder}"], "is a gpt model"),
        (["{source}", "{adapter}"], "merge an adapter into its model before"),
        (["{unknown}", "{source}"], "internlm2"),
    ],
)
def test_bad_input_is_reported_and_ends_with_2(words, message, tmp_path, sources, capsys):
    source = sources("llama")
    folder = convert_to(source, tmp_path)
    paths = {"source": source, "folder": folder, "other": sources("gpt2")}
    paths["adapter"] = tmp_path / "adapter"
    paths["adapter"].mkdir()
    (paths["adapter"] / "adapter_config.json").write_text("{}")
    paths["unknown"] = shutil.copytree(source, tmp_path / "unknown")
    Copy(paths["unknown"]).setting(model_type="internlm2")
    before = sorted(tmp_path.iterdir())
    assert main([each.format(**paths) for each in words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
