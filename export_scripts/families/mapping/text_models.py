"""The text model in a vision-language model.

Only the settings and tensors of the text model are read. If positions have three coordinates
(mrope), those of text are equal, so that the text model computes the same as a plain decoder:
transformers, models/qwen2_vl/modeling_qwen2_vl.py and models/glm4v/modeling_glm4v.py.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.families.mapping.huggingface import setting_table
from export_scripts.families.mapping.known_settings import huggingface_table
from export_scripts.families.mapping.rotary import rotary_parameters
from export_scripts.families.mapping.source_mapping import Facts
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table
from foundations.files.yaml_content import read_table

_KNOWN = read_table(Path(__file__).with_name("vision_language.yaml"))
# Settings whose defaults differ in plain decoders; sizes must be stated in any case.
_OTHER_DEFAULTS = ("num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_theta")
_IMAGE_SETTING = re.compile(r"image|video|vision|projector|spatial|^(boi|eoi|mm)_|downsample_ratio")
_IMAGE_TENSOR = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\."
)
_TEXT_TENSOR = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
_ROTARY = ("rope_scaling", "rope_parameters")
# Settings next to a text_config that count for the whole, and factors of logits, which it lacks.
_OF_WHOLE = {
    "tie_word_embeddings", "vocab_size", "quantization_config", "bos_token_id", "eos_token_id",
}  # fmt: skip
_OF_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
_EMBEDDING = "model.embed_tokens.weight"


def is_vision_language(config: Table) -> bool:
    """Return whether a config.json is that of a vision-language model."""
    return str(config.get("model_type")) in _KNOWN["wholes"]  # the value may be anything


def text_model(facts: Facts) -> Facts:
    """Return the facts of a vision-language model's text model; other facts unchanged.

    Raises:
        CheckpointMismatchError: The text_config is not a table, or omits a setting whose default
            differs in the plain decoder.
    """
    reader = facts.reader
    if reader.format != "huggingface" or not is_vision_language(facts.config):
        return facts
    kind = facts.config["model_type"]
    images = {key: match[1] for key in reader.tensors if (match := _IMAGE_TENSOR.match(key))}
    names = {
        key: _TEXT_TENSOR.sub("model.", key).removeprefix("model." * ("lm_head." in key))
        for key in reader.tensors.keys() - images.keys()
    }
    modules = ", ".join(sorted(set(images.values())))
    remark = f"took the text model of {kind}: left out {len(images)} tensors of images ({modules})"
    reader = dataclasses.replace(
        reader,
        tensors={names[key]: each for key, each in reader.tensors.items() if key in names},
        fp8={names[key]: both for key, both in reader.fp8.items() if key in names},
        remarks=(*reader.remarks, *([remark] if images else [])),
    )
    facts = dataclasses.replace(facts, reader=reader)
    settings = _text_settings(facts, kind)
    return dataclasses.replace(facts, reader=dataclasses.replace(reader, config=settings))


def _text_settings(facts: Facts, kind: str) -> Fields:
    whole, where = facts.config, f"{facts.reader.path}: config.json"
    # Before transformers 5, Qwen2-VL has them next to the settings of images.
    stated = whole.get("text_config", {})
    if not isinstance(stated, Mapping):
        raise CheckpointMismatchError(f"{where}: text_config = {stated!r:.100}: expected a table")
    text = {
        key: value
        for key, value in {**whole, **stated}.items()
        if key not in ("architectures", "text_config") and not _IMAGE_SETTING.search(key)
    }
    if whole.get("tie_word_embeddings") is not None:  # the whole model's setting counts
        text["tie_word_embeddings"] = whole["tie_word_embeddings"]
    if facts.has(_EMBEDDING):
        text.setdefault("vocab_size", facts.rows(_EMBEDDING))
    own = str(stated.get("model_type") or _KNOWN["wholes"][kind])
    plain, always = _KNOWN["plain"].get(own, (own, {}))
    known = {**huggingface_table()["*"], **huggingface_table().get(plain, {})}
    problems = [
        f"{key} = {whole[key]!r:.100}, and {stated.get(key)!r:.100} in text_config: releases of "
        "transformers read one or the other; remove the wrong one"
        for key in sorted(known.keys() & text.keys() & whole.keys() - _OF_WHOLE)
        if stated and known[key].use == "read" and whole[key] != stated.get(key)
    ]
    problems += [
        f"{key} = {text[key]!r:.100}, and a {own} always computes with {value!r}: remove it"
        for key, value in always.items()
        if text.get(key, value) not in (value, None)
    ]
    for key in sorted(_OF_LOGITS.keys() & known.keys()):
        value, neutral = text.get(key, known[key].values[0]), _OF_LOGITS[key]
        if value != neutral:
            problems.append(
                f"{key} = {value!r:.100} of a {plain}, which a {kind} does not apply: state "
                f"{json.dumps(neutral)}"
            )
    refuse(problems, where)
    text |= {key: _without_images(text[key]) for key in _ROTARY if text.get(key)}
    text |= {**always, "model_type": plain}
    if plain == own:
        return {**_sizes(plain), **text}
    rotary = rotary_parameters(text)
    given = {**(rotary if isinstance(rotary, Mapping) else {}), **text}
    needed = [*_OTHER_DEFAULTS, *(["partial_rotary_factor"] if plain == "glm4" else [])]
    needed += ["max_window_layers"] if text.get("use_sliding_window") else []
    if missing := [name for name in needed if given.get(name) is None]:
        raise CheckpointMismatchError(
            f"{where}: no {', '.join(missing)}, whose defaults differ in a {own} and in a "
            f"{plain}: state them"
        )
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if plain == "glm4" and text.get("head_dim") is None and type(heads) is type(hidden) is int:
        text["head_dim"] = hidden // max(1, heads)
    return text


def _sizes(kind: str) -> Fields:
    """Return the library's default sizes of a type, which a text_config may omit."""
    table = huggingface_table().get(kind, {})
    rows = (row for row in setting_table("decoder") if row.kind in ("size", "count"))
    names = {name for row in rows for name in row.names.split()} & table.keys()
    return {name: table[name].values[0] for name in sorted(names) if table[name].values}


def _without_images(rotary: Any) -> Any:
    """Return rotary parameters without those of mrope; None if nothing is left."""
    if not isinstance(rotary, Mapping):
        return rotary
    return {
        key: value
        for key, value in rotary.items()
        if not key.startswith("mrope_")
        and (key, value) not in (("type", "mrope"), ("rope_type", "mrope"))
    } or None
