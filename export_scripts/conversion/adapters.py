"""LoRA adapters of PEFT, NeMo 1, NeMo 2 and Megatron Bridge: their factors, by their model's names.

Layout: huggingface/peft, peft/utils/save_and_load.py; NVIDIA/NeMo 1.x,
nlp/modules/common/megatron/adapters/parallel_adapters.py; NeMo 2, nemo/collections/llm/peft;
Megatron Bridge, src/megatron/bridge/peft/lora.py.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.checkpoints import open_checkpoint, recognise_format
from export_scripts.checkpoints.base import CheckpointReader, Piece, json_file
from export_scripts.checkpoints.huggingface import index_tensors
from export_scripts.errors import CheckpointMismatchError, first_names, listed, refuse

_PEFT_CONFIG = "adapter_config.json"
_PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# Settings of PEFT's LoRA that change nothing in how it is merged, or that are read here. Any other
# that is set, of this or a later version, is refused.
_PEFT_READ = frozenset({
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
    "init_lora_weights",
})  # fmt: skip
_PEFT_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
})  # fmt: skip
# Initial values that leave the model's own weights as they are.
_PEFT_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_PEFT_FACTOR = re.compile(
    r"^(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?$"
)
# With the model's tables of tokens, PEFT saves the originals and a second copy of trained ones.
_PEFT_ORIGINAL, _PEFT_TRAINED = ".original_module.", ".modules_to_save."
_PEFT_WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
# A pattern of an adapter is a regular expression; one with many choices could take for ever.
_MOST_PATTERN, _MOST_REPEATED, _MOST_GROUPS = 200, 2, 4
_MODULE = r"(.*\.)?({})$"
# GPT-2's linear layers, which store their matrices as (in, out).
_CONV1D = re.compile(r"\.(?:c_attn|c_proj|c_fc|q_attn)$")

# NeMo 1's names of adapters -> their layers, in megatron-core's names and in those before, and
# the axis on which training ranks cut the first factor.
_NEMO_LAYERS = {
    "lora_kqv_adapter": (("linear_qkv", "query_key_value"), 0),
    "lora_dense_attention_adapter": (("linear_proj", "dense"), 1),
    "lora_hto4h_adapter": (("linear_fc1", "dense_h_to_4h"), 0),
    "lora_4htoh_adapter": (("linear_fc2", "dense_4h_to_h"), 1),
}
_NEMO_FACTOR = re.compile(
    r"^(?P<block>.+)\.adapter_layer\.(?P<adapter>\w+)\.linear_(?P<side>in|out)\.weight$"
)
_NEMO_SCHEMES = ("lora", "qlora")
_CORE_FACTOR = re.compile(r"^(?P<module>.+)\.adapter\.linear_(?P<side>in|out)\.weight$")
_CORE_ALPHA = 32  # of NeMo 2, which saves only what a user set


@dataclass(frozen=True)
class Update:
    """A low-rank update of a matrix (out, in): scale * up @ down."""

    keys: tuple[str, ...]  # names that the matrix may have in its model
    down: tuple[Piece, ...]  # the first factor (r, in), in pieces along `down_axis`
    up: tuple[Piece, ...]  # the second factor (out, r), in pieces along its rows
    scale: float  # factor of the product
    down_axis: int = 0  # axis along which training ranks cut the first factor
    is_transposed: bool = False  # whether the matrix is stored as (in, out)


@dataclass(frozen=True)
class Adapter:
    """An adapter: the matrices that it updates, and the tensors that it replaces."""

    path: Path
    updates: tuple[Update, ...]
    files: tuple[Path, ...]
    replaced: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    kept: object = None  # keeps files alive

    def describe(self) -> str:
        """Return a remark on what is merged."""
        ranks = sorted({update.up[0].shape[1] for update in self.updates if update.up[0].shape[1:]})
        also = f", {len(self.replaced)} tensors replaced" if self.replaced else ""
        return (
            f"merged {len(self.updates)} low-rank updates of {self.path} "
            f"(rank {', '.join(map(str, ranks))}{also})"
        )


def open_adapter(path: Path, *, base: CheckpointReader, scratch_dir: Path | None) -> Adapter:
    """Return an adapter's index; no tensor is read.

    Args:
        path: A folder of PEFT, a NeMo archive or folder, or a checkpoint of Megatron Bridge.
        base: The model it belongs to.
        scratch_dir: Where a gzip archive is unpacked while the adapter is in use.

    Raises:
        CheckpointMismatchError: It is damaged, or changes a model in a way that cannot be merged.
        ValueError: It is not an adapter.
    """
    if (path / _PEFT_CONFIG).is_file():
        return _open_peft(path, base)
    own_base = None if recognise_format(path) == "bridge" else base
    reader = open_checkpoint(path, base=own_base, scratch_dir=scratch_dir)
    if reader.format == "nemo":
        return _open_nemo(path, reader)
    return _open_core(path, reader)


# Names that a matrix may have, the axis on which training ranks cut its first factor, and the side
# of one of its factors.
_Factor = tuple[tuple[str, ...], int, str]


def _adapter(
    path: Path,
    reader: CheckpointReader,
    factor: Callable[[str], _Factor | None],
    alpha: float,
    problems: list[str],
) -> Adapter:
    """Return an adapter; `factor` says what a key holds."""
    found: dict[tuple[tuple[str, ...], int], dict[str, str]] = {}
    unknown = []
    for key in reader.tensors:
        if part := factor(key):
            names, axis, side = part
            found.setdefault((names, axis), {})[side] = key
        else:
            unknown.append(key)
    if unknown:
        problems.append(f"{path} holds {first_names(unknown)}, no factors of LoRA")
    problems += _lone(path, {names[0]: sides for (names, _), sides in found.items()}, "in", "out")
    if not found and not problems:
        problems.append(f"{path} has no factors of LoRA; expected an adapter")
    refuse(listed(problems))
    updates = []
    for (names, axis), sides in found.items():
        down, up = (reader.tensors[sides[side]] for side in ("in", "out"))
        rank = up[0].shape[-1] if up[0].shape else 0
        scale = alpha / rank if rank else 0.0
        updates.append(Update(names, down, up, scale, axis))
    return Adapter(path, tuple(updates), reader.files, kept=reader)


def _lone(path: Path, factors: Mapping[str, Mapping[str, Any]], *sides: str) -> list[str]:
    alone = [name for name, found in factors.items() if set(found) != set(sides)]
    return [f"{path} has only one factor of {first_names(alone)}"] if alone else []


def _number(value: Any, what: str, problems: list[str]) -> float:
    """Return a finite number, or 1.0 after noting a problem."""
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    problems.append(f"{what} = {value!r:.100} is not a number")
    return 1.0


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _open_nemo(path: Path, reader: CheckpointReader) -> Adapter:
    settings = _table(reader.config.get("peft"))
    tuning = _table(settings.get("lora_tuning"))
    problems: list[str] = []
    if (scheme := settings.get("peft_scheme")) not in _NEMO_SCHEMES:
        problems.append(f"{path}: peft.peft_scheme = {scheme!r}; expected lora")
    if tuning.get("weight_tying"):
        problems.append(f"{path}: peft.lora_tuning.weight_tying = true is not supported")
    # Without a scale of its own, an adapter's output is added as it is.
    width = tuning.get("adapter_dim")
    alpha = tuning.get("alpha") if tuning.get("alpha") is not None else width
    if alpha is None and not problems:
        problems.append(f"{path}: peft.lora_tuning states neither alpha nor adapter_dim")
    alpha = 1 if alpha is None else _number(alpha, f"{path}: peft.lora_tuning.alpha", problems)
    return _adapter(path, reader, _nemo_factor, alpha, problems)


def _nemo_factor(key: str) -> _Factor | None:
    match = _NEMO_FACTOR.match(key)
    if match is None or match["adapter"] not in _NEMO_LAYERS:
        return None
    layers, axis = _NEMO_LAYERS[match["adapter"]]
    return tuple(f"{match['block']}.{layer}.weight" for layer in layers), axis, match["side"]


def _open_core(path: Path, reader: CheckpointReader) -> Adapter:
    """Return the adapter in a distributed checkpoint of NeMo 2 or Megatron Bridge."""
    settings = _table(reader.config.get("peft"))
    problems: list[str] = []
    kind = str(settings.get("_target_") or "none").rpartition(".")[2]
    if kind != "LoRA":
        problems.append(f"{path} is trained with {kind}; expected LoRA")
    alpha = _number(settings.get("alpha", _CORE_ALPHA), f"{path}: alpha", problems)
    return _adapter(path, reader, _core_factor, alpha, problems)


def _core_factor(key: str) -> _Factor | None:
    match = _CORE_FACTOR.match(key)
    return ((f"{match['module']}.weight",), 0, match["side"]) if match else None


def _open_peft(path: Path, base: CheckpointReader) -> Adapter:
    config = json_file(path / _PEFT_CONFIG)
    weights = next((path / name for name in _PEFT_WEIGHTS if (path / name).is_file()), None)
    problems = _peft_problems(config, path / _PEFT_CONFIG)
    if weights is None:
        problems.append(f"{path} has no weights; expected {' or '.join(_PEFT_WEIGHTS)}")
    if problems or weights is None:
        raise CheckpointMismatchError(listed(problems))
    factors: dict[str, dict[str, Piece]] = {}
    embeddings: set[str] = set()
    replaced: dict[str, tuple[Piece, ...]] = {}
    roles: dict[tuple[str, str], str] = {}
    stored = index_tensors(weights)
    for name, tensor in stored.items():
        if _PEFT_ORIGINAL in name or (
            _PEFT_TRAINED in name and name.replace(_PEFT_TRAINED, ".") in stored
        ):
            continue
        bare = name.removeprefix("base_model.model.")
        if match := _PEFT_FACTOR.match(bare):
            role = (match["module"], match["side"])
            factors.setdefault(match["module"], {})[match["side"]] = tensor
            embeddings |= {match["module"]} if match["embedding"] else set()
        else:
            role = (_PEFT_WRAPPERS.sub("", bare), "")
            replaced[role[0]] = (tensor,)
        if (other := roles.setdefault(role, name)) != name:
            problems.append(f"{weights}: {other} and {name} are two values of one tensor")
    problems += _lone(path, factors, "A", "B")
    if not factors and not replaced:
        problems.append(f"{weights} holds nothing")
    updates = []
    conv1d = base.config.get("model_type") == "gpt2"
    for module, sides in factors.items():
        if set(sides) == {"A", "B"}:
            scale = _peft_scale(config, module, sides["B"], path / _PEFT_CONFIG, problems)
            turned = module in embeddings or (conv1d and _CONV1D.search(module) is not None)
            down, up, names = (sides["A"],), (sides["B"],), (f"{module}.weight",)
            updates.append(Update(names, down, up, scale, is_transposed=turned))
    refuse(listed(problems))
    return Adapter(path, tuple(updates), (path / _PEFT_CONFIG, weights), replaced)


def _peft_problems(config: Mapping[str, Any], where: Path) -> list[str]:
    """Return every setting of an adapter that cannot be merged."""
    problems = []
    if (kind := config.get("peft_type")) != "LORA":
        return [f"{where}: peft_type = {kind!r}; expected LORA"]
    remedy = "load it with peft, merge_and_unload, and convert what save_pretrained leaves"
    start = config.get("init_lora_weights", True)
    if not any(start is each or start == each for each in _PEFT_STARTS):
        problems.append(
            f"{where}: init_lora_weights = {start!r} changes the model's own weights: {remedy}"
        )
    problems += [
        f"{where}: {key} = {value!r:.100} is not supported: {remedy}"
        for key, value in config.items()
        if value and key not in _PEFT_READ and key not in _PEFT_HARMLESS
    ]
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key) or {}
        if not isinstance(table, Mapping):
            problems.append(f"{where}: {key} is not a table")
            continue
        problems += [
            f"{where}: {key}: {pattern!r:.100} is not a pattern of modules; name them one by one"
            for pattern in table
            if not _is_pattern(pattern)
        ]
    return problems


def _is_pattern(pattern: str) -> bool:
    repeated = len(re.findall(r"[*+{]|(?<!\()\?", pattern))
    if len(pattern) > _MOST_PATTERN or repeated > _MOST_REPEATED:
        return False
    # A repeated group, or flags for all that it stands in, which Python 3.10 takes anywhere.
    if re.search(r"\)[*+{]|\(\?[aiLmsux]+\)", pattern):
        return False
    try:
        re.compile(pattern)  # alone, so that it ends no group of what it stands in
        return re.compile(_MODULE.format(pattern)).groups <= _MOST_GROUPS + 2
    except re.error:
        return False


def _peft_scale(
    config: Mapping[str, Any], module: str, up: Piece, where: Path, problems: list[str]
) -> float:
    """Return the factor of a module's update; a rank or alpha of its own goes first."""
    rank = up.shape[-1] if up.shape else 0
    stated = _of_module(config, "rank_pattern", module, config.get("r"))
    if stated != rank or not rank:
        problems.append(f"{where}: r = {stated!r}, but the factors of {module} are of rank {rank}")
        return 1.0
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha"))
    alpha = _number(alpha, f"{where}: lora_alpha of {module}", problems)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_module(config: Mapping[str, Any], table: str, module: str, usual: Any) -> Any:
    """Return the value of the first pattern that fits a module's name, or of its end."""
    for pattern, value in (config.get(table) or {}).items():
        if re.match(_MODULE.format(pattern), module):
            return value
    return usual
