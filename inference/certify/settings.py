"""Compare the settings that decide what a model computes, and where its answers end."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from export_scripts.checkpoints.base import Region, json_file
from export_scripts.checkpoints.tokenizers import special_ids
from export_scripts.conversion.ft_source import FTFolder
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from export_scripts.families.mapping.source_mapping import Facts
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark
from inference.certify.pair import Pair

# Where a head is stored, and how heads lie among ranks: the tensors show both.
_SHOWN_BY_TENSORS = ("untied_head", "ia3_num_tasks", "vocab_size", "kv_head_num", "separate_qkv")
_MOST_DIGITS = 1e-11  # what the rounding of a reciprocal leaves
# Of config.json: what no model computes from.
_WITHOUT_EFFECT = (
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "return_dict", "quantization_config", "bos_token_id", "eos_token_id",
    "pad_token_id", "_attn_implementation", "output_attentions", "output_hidden_states",
    "id2label", "label2id", "attention_dropout", "hidden_dropout", "initializer_range",
)  # fmt: skip
_POSITIONS = "max_position_embeddings"
_WITHOUT_FUNCTION = ("transformers_version", "_from_model_config", "eos_token_id")


def compare_settings(pair: Pair) -> Part:
    """Compare the settings of both sides, as the family reads them, or as they are written."""
    folder = pair.folder
    own, stated = pair.facts.config, folder.facts.config
    both = pair.facts.reader.format == folder.reader.format == "huggingface"
    findings: list[Remark] = []
    if pair.config is not None and folder.config is not None:
        findings += _architectures(pair.config, folder.config)
        compared = "architecture"
    elif both:
        findings += _written(*_by_library(pair))
        compared = "config.json"
    else:
        reason = "the family of the folder cannot read its configuration"
        return Part("settings", "", (Remark(NOT_COMPUTED, "not read", "config.json", reason),))
    if both and pair.config is not None:
        findings += _unknown(pair)
        if (a := own.get(_POSITIONS)) != (b := stated.get(_POSITIONS)):
            findings.append(_setting(_POSITIONS, a, b))
    if pair.config is not None and (tables := _table_rows(pair)):
        findings += tables
    return Part("settings", compared, tuple(findings))


def _setting(name: str, source: Any, folder: Any) -> Remark:
    return Remark(DIFFERS, "setting", name, f"{folder!r:.200}, and {source!r:.200} in the source")


def _architectures(source: FTConfig, folder: FTConfig) -> Iterator[Remark]:
    try:
        mine, theirs = (_flat(dataclasses.asdict(c.architecture())) for c in (source, folder))
    except ValueError as error:
        yield Remark(DIFFERS, "setting", "architecture", str(error))
        return
    for name in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(name), theirs.get(name)
        if name.partition(".")[0] not in _SHOWN_BY_TENSORS and not _is_same(one, other):
            yield _setting(name, one, other)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in table.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        out |= inner or {f"{prefix}{name}": value}
    return out


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_MOST_DIGITS)
    return bool(one == other)


def _by_library(pair: Pair) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both configurations as transformers reads them, or as they are written.

    Its releases spell rotary settings in two ways, and write some defaults or leave them out.
    """
    readers = (pair.facts.reader, pair.folder.reader)
    try:
        from transformers import AutoConfig

        mine, theirs = (
            AutoConfig.from_pretrained(each.path, local_files_only=True, trust_remote_code=False)
            for each in readers
        )
    except (ImportError, OSError, ValueError, KeyError):  # a model that it does not know, too
        return readers[0].config, readers[1].config
    return mine.to_dict(), theirs.to_dict()


def _written(own: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[Remark]:
    """Yield the settings of two config.json that differ, whatever they mean."""
    mine, theirs = _flat(own), _flat(stated)
    for name in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(name), theirs.get(name)
        if not name.startswith(_WITHOUT_EFFECT) and not _is_same(one, other):
            yield _setting(name, one, other)


def _unknown(pair: Pair) -> Iterator[Remark]:
    """Yield settings of the folder that may change what is computed, and are not the source's."""
    assert pair.folder.mapping is not None
    try:
        found = pair.folder.mapping.obstacles(pair.folder.facts)
    except ValueError:  # reported as the folder's configuration
        return
    for name, why in found.items():
        if pair.facts.config.get(name) != pair.folder.facts.config.get(name):
            yield Remark(DIFFERS, "setting", name, why)


def _table_rows(pair: Pair) -> Iterator[Remark]:
    """Yield that config.json states another vocabulary than the embedding has rows."""
    stated = pair.folder.facts.config.get("vocab_size")
    for written in pair.tensors:
        if written.items[0].tensor.name in ("model.wte", "shared.weight_T"):
            name = pair.folder.facts.resolve(written.key)
            rows = pair.folder.reader.tensors[name][0].shape[0] if name else stated
            if stated is not None and rows != stated and not pair.folder.is_shards:
                yield Remark(
                    DIFFERS, "setting", "vocab_size", f"{stated}, and {written.key} has {rows} rows"
                )


def compare_generation(pair: Pair) -> Part:
    """Compare the tokens that end an answer, and the defaults of generation."""
    if pair.config is not None and not {"end_id", "eos_token_id"} & vars(pair.config).keys():
        return Part("generation", "an encoder, which generates nothing")
    mine, theirs = (_generation(facts) for facts in (pair.facts, pair.folder.facts))
    findings = [
        Remark(DIFFERS, "generation_config.json", name, f"{other!r}, and {one!r} in the source")
        for name in dict.fromkeys((*mine, *theirs))
        if name not in _WITHOUT_FUNCTION
        and (one := mine.get(name)) != (other := theirs.get(name))
        and mine
        and not (name not in mine and other == pair.facts.config.get(name))
    ]
    try:
        ends = _ends(pair.facts, pair.config)
        found = _ends(pair.folder.facts, pair.folder.config)
    except ValueError as error:
        return Part("generation", "", (Remark(DIFFERS, "end tokens", "folder", str(error)),))
    if not ends:
        findings.append(
            Remark(NOT_COMPUTED, "end tokens", "source", "neither it nor its tokenizer names some")
            if found
            else Remark(UP_TO, "end tokens", "both", "neither side names some")
        )
    elif not ends <= found:
        lost = sorted(ends - found)
        detail = f"{lost} end an answer of the source, and not of the folder ({sorted(found)})"
        findings.append(Remark(DIFFERS, "end tokens", "folder", detail))
    elif found - ends:
        detail = f"{sorted(found - ends)} end an answer of the folder alone"
        findings.append(Remark(DIFFERS, "end tokens", "folder", detail))
    return Part("generation", f"end tokens {sorted(ends)}", tuple(findings))


def _generation(facts: Facts) -> Mapping[str, Any]:
    file = facts.tokenizer.get(GENERATION_FILE)
    return json_file(file) if file else {}


def _ends(facts: Facts, config: FTConfig | None) -> set[int]:
    """Return the ids of every token that a server takes for the end of an answer."""
    files: Mapping[str, Region] = {
        name: file for name, file in facts.tokenizer.items() if name != GENERATION_FILE
    }
    found = {*end_tokens(_generation(facts)), *end_tokens(facts.config, "config.json")}
    if isinstance(facts.reader, FTFolder):  # its settings are in config.ini
        found |= {vars(config)[name] for name in ("end_id", "eos_token_id") if name in vars(config)}
    end = special_ids(files).eos
    return found | ({end} if end is not None else set())
