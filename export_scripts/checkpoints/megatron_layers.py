"""Other forms of Megatron's decoders, read as megatron-core's GPTModel.

A HybridModel has separate layers for attention and MLP (with Mamba, they stay so); models before
megatron-core have other names. Layout: NVIDIA/Megatron-LM, megatron/core/models/hybrid,
docs/user-guide/hybrid-model-migration.md and, until 2026, megatron/legacy/model; NeMo 1.x,
nlp/modules/common/megatron.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    Piece,
    Pieces,
    Tensors,
    last_name,
)
from export_scripts.checkpoints.chunks import chunked, concatenated
from export_scripts.checkpoints.partitioned import renamed
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import is_count

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

_FORMATS = ("nemo", "megatron", "nemo2", "bridge")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# If no pattern is stated, megatron-core derives one from these.
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")

# megatron/core/models/hybrid/hybrid_layer_allocation.py
_LETTERS = {
    "*": "attention",
    "-": "an MLP",
    "E": "experts",
    "M": "Mamba",
    "G": "a gated delta network",
    "D": "DeepSeek's sparse attention",
    "+": "multi-latent attention without norms, which no model in transformers has",
}
# Letter -> the module that a layer of this kind has.
_PARTS = {"*": ".self_attention.", "-": ".mlp.", "E": ".mlp.", "M": ".mixer."}
# The layers of a block: attention, an MLP or experts, or both.
_BLOCK = re.compile(r"\*?[-E]|\*")
# A decoder's pattern. With both MLPs and experts, every block must have one of them: it is not
# known which of the two a block without either lacks.
_DECODER = re.compile(r"[*-]+|[*E]+|(\*?[-E])+")
# A pattern with Mamba, whose layers are not joined in blocks, and the formats that can have it.
_WITH_MAMBA, _MAMBA_FORMATS = re.compile(r"[-*E]*M[-*EM]*"), ("megatron", "nemo2", "bridge")
_HYBRID_LAYER = re.compile(r"^((?:model\.)?decoder\.layers\.)(\d+)(\..+)$")
_HYBRID_NORM = re.compile(r"^((?:model\.)?decoder\.)final_norm\.")
_PREDICTION = re.compile(r"^(?:model\.)?mtp\.")
# Transformer Engine's experts: one module, with the expert's number after the parameter's name.
_GROUPED_EXPERT = re.compile(r"\b(mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")

# Keys that name the function that builds the layers, and megatron-core's and Bridge's own values.
# megatron/core/models/hybrid/hybrid_layer_specs.py; bridge/models/hybrid/hybrid_provider.py
_SPECS = ("spec", "hybrid_stack_spec", "mamba_stack_spec")
_KNOWN_SPEC = re.compile(
    r"(get_default_|transformer_engine_|modelopt_)?(hybrid|mamba)(_inference)?_stack_spec|"
    r"get_(hybrid|mamba)_stack_modelopt_spec"
)

# Settings that some releases of Megatron-LM ignore for a HybridModel: hybrid_builders.py does not
# pass them on.
_WITHOUT_EFFECT = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")
# With it, a HybridModel rotates pairs of dimensions by angles meant for halves (0.16 to 0.19).
_INTERLEAVED = "rotary_interleaved"


def as_gpt_model(reader: CheckpointReader) -> CheckpointReader:
    """Return a Megatron-style decoder under the names of GPTModel; other checkpoints unchanged.

    A HybridModel with Mamba keeps its layers; its hybrid_layer_pattern has their letters. Layers of
    multi-token prediction, which only training and speculative decoding use, are left out.

    Raises:
        CheckpointMismatchError: A HybridModel has layers that no decoder has, or its tensors
            contradict its pattern; a model before megatron-core has rows in another order.
    """
    if reader.format not in _FORMATS:
        return reader
    tensors = {
        _GROUPED_EXPERT.sub(r"\1.local_experts.\4.\2.\3", name): pieces
        for name, pieces in reader.tensors.items()
    }
    if len(tensors) == len(reader.tensors):
        reader = dataclasses.replace(reader, tensors=tensors)
    if any(_PREDICTION.match(name) for name in reader.tensors):
        reader = _without_prediction(reader)
    stated = [key for key in _PATTERNS if reader.config.get(key)]
    if stated or any(_HYBRID_NORM.match(name) for name in reader.tensors):
        return _from_hybrid(reader, stated)
    if any(_LEGACY.match(name) for name in reader.tensors):
        return _from_legacy(reader)
    return reader


def _without_prediction(reader: CheckpointReader) -> CheckpointReader:
    kept = {name: each for name, each in reader.tensors.items() if not _PREDICTION.match(name)}
    count = len(reader.tensors) - len(kept)
    return dataclasses.replace(
        reader,
        tensors=kept,
        remarks=(*reader.remarks, f"left out {count} tensors of multi-token prediction (mtp.*)"),
    )


def _from_hybrid(reader: CheckpointReader, stated: Sequence[str]) -> CheckpointReader:
    config = reader.config
    if not stated:
        raise CheckpointMismatchError(
            f"{reader.path} is a HybridModel (decoder.final_norm) without {_PATTERNS[0]}: its "
            "kinds of layers are unknown; save it with a release that states the pattern"
        )
    key = stated[0]
    layers = _parsed(reader, key, config[key])
    if config.get("num_layers") not in (None, len(layers)):
        raise CheckpointMismatchError(
            f"{reader.path}: num_layers = {config['num_layers']!r:.100}, but {key} = "
            f"{config[key]!r} has {len(layers)} layers: its settings are of different models"
        )
    problems = [
        f"{name} = {config[name]!r:.100}: a HybridModel is trained without it in some releases of "
        "Megatron-LM and with it in others"
        for name in _WITHOUT_EFFECT
        if reader.format == "megatron" and config.get(name)
    ]
    if config.get(_INTERLEAVED):
        problems.append(
            f"{_INTERLEAVED} = {config[_INTERLEAVED]!r:.100}: a HybridModel rotates pairs of "
            "dimensions by the angles of halves, which no model in transformers does"
        )
    problems += [
        f"{name} = {config[name]!r:.100}: custom layers, which may compute something else"
        for name in _SPECS
        if config.get(name) and not _KNOWN_SPEC.fullmatch(last_name(config[name]))
    ]
    problems += _contradictions(reader.tensors, layers)
    refuse(problems, reader.path)
    common = dict.fromkeys((*_PATTERNS, *_RATIOS, *_SPECS, "is_hybrid_model", "moe_layer_freq"))
    if "E" not in layers:
        common |= {"num_moe_experts": None, "num_experts": None}
    if "M" in layers:
        own = {_PATTERNS[0]: layers, "num_layers": len(layers)}
        return dataclasses.replace(
            reader,
            config={**config, **common, **own},
            tensors={_block_name(name): pieces for name, pieces in reader.tensors.items()},
            remarks=(*reader.remarks, f"HybridModel, {len(layers)} layers: {config[key]}"),
        )
    blocks = [*_BLOCK.finditer(layers)]
    settings = {
        name: _per_block(config.get(name), name, [block.start() for block in blocks])
        for name in _SHARED_PATTERNS
    }
    settings["num_layers"] = len(blocks)
    if "E" in layers:
        settings["moe_layer_freq"] = [int("E" in block[0]) for block in blocks]
    numbers = {place: n for n, block in enumerate(blocks) for place in range(*block.span())}
    tensors = {_block_name(name, numbers): pieces for name, pieces in reader.tensors.items()}
    remarks = [f"HybridModel, {len(blocks)} blocks: {config[key]}"]
    for part, letters in (("attention", "*"), ("an MLP", "-E")):
        if without := [n for n, block in enumerate(blocks) if not set(block[0]) & set(letters)]:
            tensors |= _zeros(tensors, without, is_attention=letters == "*")
            remarks.append(f"blocks without {part} get one of zeros, which adds nothing: {without}")
    return dataclasses.replace(
        reader,
        config={**config, **common, **settings},
        tensors=tensors,
        remarks=(*reader.remarks, *remarks),
    )


def _parsed(reader: CheckpointReader, key: str, pattern: Any) -> str:
    """Return the letters of the layers, without pipeline stages and multi-token prediction."""
    layers = pattern.partition("/")[0].replace("|", "") if isinstance(pattern, str) else ""
    if _DECODER.fullmatch(layers) and "*" in layers and set(layers) != {"*"}:
        return layers
    if _WITH_MAMBA.fullmatch(layers) and reader.format in _MAMBA_FORMATS:
        return layers
    kinds = ", ".join(
        f"{letter} is {_LETTERS.get(letter, 'unknown')}" for letter in dict.fromkeys(layers)
    )
    raise CheckpointMismatchError(
        f"{reader.path}: {key} = {pattern!r:.200} ({kinds or 'no layers'}): expected attention (*) "
        "and MLPs (-) or experts (E), with both kinds one in each block; from Megatron-LM, NeMo 2 "
        "and Megatron Bridge also all of these with Mamba (M), in any order. Bridge writes other "
        "models as Hugging Face folders (AutoBridge.export_ckpt, on GPUs), which "
        "deploy.engine=vllm serves"
    )


def _contradictions(tensors: Iterable[str], layers: str) -> list[str]:
    """Return a problem for each tensor whose layer the pattern lacks, or has as another kind."""
    problems = []
    for name in tensors:
        if match := _HYBRID_LAYER.match(name):
            number = int(match[2])
            kind = layers[number] if number < len(layers) else ""
            if not kind:
                problems.append(f"{name} is beyond the pattern's {len(layers)} layers")
            elif match[3].startswith(tuple({*_PARTS.values()} - {_PARTS[kind]})):
                problems.append(f"{name} is in a layer of {_LETTERS[kind]}")
    return problems


# Settings that list an entry for each layer, or give a period; the function computes the entry of
# a layer, counted from 1, from the period.
# megatron/core/transformer/transformer_config.py, transformer/utils.py
_SHARED_PATTERNS = {
    "no_rope_freq": lambda layer, every: int(layer % every == 0),
    "window_attn_skip_freq": lambda layer, every: int(layer % every != 0),
}


def _per_block(value: Any, key: str, layers: Sequence[int]) -> Any:
    """Return a setting with an entry for each block, that of the block's first layer."""
    if isinstance(value, list) and len(value) > max(layers):
        return [value[layer] for layer in layers]
    if is_count(value, 1):
        return [_SHARED_PATTERNS[key](layer + 1, value) for layer in layers]
    return value


def _block_name(name: str, blocks: Mapping[int, int] | None = None) -> str:
    """Return GPTModel's name of a HybridModel's tensor; `blocks` maps a layer to its block."""
    if blocks and (match := _HYBRID_LAYER.match(name)):
        return f"{match[1]}{blocks[int(match[2])]}{match[3]}"
    return _HYBRID_NORM.sub(r"\1final_layernorm.", name)


def _zeros(tensors: Tensors, blocks: Sequence[int], *, is_attention: bool) -> Tensors:
    """Return tensors of zeros for `blocks` that lack attention or an MLP.

    Names and shapes are those of a block that has it. Its last projection is zero, so that it adds
    nothing to the residual.
    """
    halves: dict[int, Tensors] = {}
    for name, pieces in tensors.items():
        match = _HYBRID_LAYER.match(name)
        if match and match[3].startswith((".self_attention.", ".input_")) == is_attention:
            zeros = tuple(
                ComputedPiece(piece.dtype, piece.shape, (), _Zeros(piece)) for piece in pieces
            )
            halves.setdefault(int(match[2]), {}).update(
                {f"{match[1]}{block}{match[3]}": zeros for block in blocks}
            )
    return next(iter(halves.values()), {})


@dataclasses.dataclass(frozen=True)
class _Zeros:
    """Zeros of a piece's shape and type."""

    piece: Piece

    def __call__(self, _maps: FileMaps) -> Array:
        import numpy as np

        from export_scripts.numeric.arrays import DTYPES

        return np.zeros(self.piece.shape, DTYPES[self.piece.dtype])


_LEGACY = re.compile(r"^(model\.)?language_model\.")
_LEGACY_NORM = re.compile(r"\b(input|post_attention|final)_norm\.")
# Parts of names before megatron-core -> megatron-core's.
_CORE_PARTS = (
    (r"\b(?:encoder|transformer)\.(?=layers\.|final_)", "decoder."),
    (r"\b(?:self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"\b(?:self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"\bpost_attention_layernorm\.", "pre_mlp_layernorm."),
    (r"\bmlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"\bmlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
)
_SECOND_HALF = "mlp.dense_h_to_4h_2."
# Checkpoint versions in which the rows of queries, keys and values are in megatron-core's order;
# NeMo states none.
# NVIDIA/Megatron-LM, megatron/checkpointing.py, fix_query_key_value_ordering
_ROWS_OF_CORE = (2, 3, None)


def _from_legacy(reader: CheckpointReader) -> CheckpointReader:
    """Return a model before megatron-core, under megatron-core's names if its positions are rotary.

    Others keep their names, with norm (newer releases) spelled layernorm (older ones).
    """
    config = reader.config
    tensors = {_LEGACY_NORM.sub(r"\1_layernorm.", name): p for name, p in reader.tensors.items()}
    is_rotary = config.get("use_rotary_position_embeddings")
    if not is_rotary and config.get("position_embedding_type") != "rope":
        return dataclasses.replace(reader, tensors=tensors)
    version = config.get("checkpoint_version")
    if version not in _ROWS_OF_CORE or config.get("megatron_legacy"):
        stated = {
            key: config[key] for key in ("checkpoint_version", "megatron_legacy") if key in config
        }
        raise CheckpointMismatchError(
            f"{reader.path}: {stated} with rotary positions: expected checkpoint_version 2 or 3, "
            "in which the rows of queries, keys and values are grouped by heads"
        )
    named = {}
    for name, pieces in tensors.items():
        if _SECOND_HALF in name:
            continue
        if second := tensors.get(name.replace("mlp.dense_h_to_4h.", _SECOND_HALF)):
            pieces = _joined(pieces, second) if second is not pieces else pieces
        named[renamed(_LEGACY.sub(r"\1", name), _CORE_PARTS)] = pieces
    if reader.format == "megatron" and config.get("openai_gelu"):
        # Only these models of Megatron-LM read it: gelu in its tanh form, as TE computes it.
        config = {**config, "use_te_activation_func": True}
    return dataclasses.replace(reader, config=config, tensors=named)


def _joined(first: Sequence[Piece], second: Sequence[Piece]) -> Pieces:
    """Return the halves of a gated projection joined, for each training rank."""
    pairs = zip(map(chunked, first), map(chunked, second), strict=True)
    return tuple(concatenated(*halves) for halves in pairs)
