"""Compare the settings that decide what a model computes, and where its answers end."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import json_file
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.checkpoints.quantized import QUANTIZATION
from export_scripts.checkpoints.sharded_huggingface import CONFIG_NAME
from export_scripts.checkpoints.tokenizers import special_ids
from export_scripts.conversion.ft_source import FTFolder
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from export_scripts.families.mapping.known_settings import KnownSetting, huggingface_table
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.text_models import has_images
from export_scripts.numeric.dtypes import SOURCE_TYPES
from inference.certify.findings import (
    DIFFERS,
    EQUAL,
    NOT_COMPUTED,
    UP_TO,
    Part,
    Remark,
    Status,
    differing,
    differs,
    dotted,
    is_same,
    not_computed,
)
from inference.certify.huggingface import import_transformers
from inference.certify.pair import TIE, Pair

_POSITIONS, _ROWS = "max_position_embeddings", "vocab_size"
# Where a head is stored, and how heads lie among ranks: the tensors show both.
_SHOWN_BY_TENSORS = ("untied_head", "ia3_num_tasks", _ROWS)
_SHOWN_BY_SHARDS = (*_SHOWN_BY_TENSORS, "kv_head_num", "separate_qkv")
# Keys of config.json from which no model computes, or that another part compares; and others whose
# weight does not depend on their values.
_WEIGHTS: Mapping[str, Status] = {
    **dict.fromkeys((
        "_name_or_path", "transformers_version", "use_cache", "return_dict", "quantization_config",
        "eos_token_id", "_attn_implementation", "output_attentions", "output_hidden_states",
        "id2label", "label2id", "attention_dropout", "hidden_dropout", "initializer_range",
        TIE, _ROWS,
    ), EQUAL),
    # transformers 4 takes LongRoPE's length next to the other parameters alone, 5 among them, too.
    **dict.fromkeys(("bos_token_id", "pad_token_id", "original_max_position_embeddings"), UP_TO),
    _POSITIONS: DIFFERS,
}  # fmt: skip
# Classes that a library takes, and code that it may run.
_ARCHITECTURES, _CODE = "architectures", "auto_map"
_CLASSES = (_ARCHITECTURES, _CODE)
_TYPES = ("dtype", "torch_dtype")  # that a server computes in by default
# Spellings of transformers 4, and those of transformers 5: each release reads its own.
_SPELLINGS = {
    "rope_theta": "rope_parameters.rope_theta",
    "partial_rotary_factor": "rope_parameters.partial_rotary_factor",
    "rope_scaling.type": "rope_parameters.rope_type",
    "torch_dtype": "dtype",
}
_DERIVED = ("feed_forward_proj",)  # transformers 5 states what 4 derives from it
_TOKEN = "_token_id"
_SETTING = "setting"
_START = "decoder_start_token_id"
# Defaults of generation_config.json that some releases write: they leave an answer as it is.
_NEUTRAL = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty",
                     "encoder_repetition_penalty", "num_beams", "num_beam_groups",
                     "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
                     "diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
}  # fmt: skip
_WITHOUT_FUNCTION = ("transformers_version", "use_cache", "_from_model_config", "eos_token_id")


def compare_settings(pair: Pair) -> Part:
    """Compare the settings of both sides, as the family reads them, and as they are written."""
    folder, findings, compared = pair.folder, list[Remark](), "config.json"
    both = pair.facts.reader.format == folder.reader.format == "huggingface"
    if pair.config is not None and folder.config is not None:
        shown = _SHOWN_BY_TENSORS if both else _SHOWN_BY_SHARDS
        findings, compared = [*_architectures(pair.config, folder.config, shown)], "architecture"
    elif not both:
        reason = "the family of the folder cannot read its configuration"
        return not_computed("settings", reason, "config.json")
    if not folder.is_shards:
        findings += _table_rows(pair)
        findings += _unknown(pair) if pair.config is not None else ()
        findings += [] if both else _other_class(pair)
    if both:
        named = {each.where for each in findings}
        findings += [each for each in _stated(pair) if each.where not in named]
    names = [each.where for each in findings if each.status == UP_TO]
    up_to = (f"settings that the comparison does not depend on ({', '.join(names)})",)
    return Part("settings", compared, tuple(findings), up_to if names else ())


def _architectures(source: FTConfig, folder: FTConfig, shown: Sequence[str]) -> Iterator[Remark]:
    try:
        mine, theirs = (
            {**dataclasses.asdict(each.architecture()), _START: vars(each).get(_START)}
            for each in (source, folder)
        )
    except ValueError as error:
        yield Remark(DIFFERS, _SETTING, "architecture", str(error))
        return
    for name, one, other in differing(mine, theirs):
        if name.partition(".")[0] not in shown:
            yield differs(_SETTING, name, one, other)
    # Shards answer an empty prompt from there; of other folders it is a token of the tokenizer.
    one, other = (vars(each).get("start_id") for each in (source, folder))
    if one != other and shown is _SHOWN_BY_SHARDS:
        yield differs(_SETTING, "start_id", one, other, UP_TO)


def _other_class(pair: Pair) -> Iterator[Remark]:
    """Yield classes in config.json that are not those of such a model, whatever its source is."""
    mapping, stated = pair.folder.mapping, pair.folder.facts.config
    if mapping is None or mapping.written is None or pair.config is None:
        return
    usual = [
        each["architectures"]
        for is_tied in (False, True)
        for each in mapping.written(pair.config, is_tied)
        if each.get("model_type") == stated.get("model_type", "")
    ]
    found = stated.get(_ARCHITECTURES)
    if usual and found is not None and found not in usual:
        detail = f"{found!r:.100}, and {usual[0]!r} is the class of such a model"
        yield Remark(DIFFERS, _SETTING, _ARCHITECTURES, detail)


def _by_library(path: Path) -> Any:
    """Return a configuration as transformers reads it, or why it does not."""
    try:
        kind = import_transformers().AutoConfig
        return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # files can hold anything, and a model that it does not know
        return f"transformers does not read it: {error}"


def _stated(pair: Pair) -> Iterator[Remark]:
    """Yield every key of config.json that the two sides state otherwise, whatever it changes."""
    own, stated = (
        dotted(json_file(Path(each.path, CONFIG_NAME)))
        for each in (pair.facts.reader, pair.folder.reader)
    )
    if has_images(own):
        return  # The text model, which the families have compared, states the same elsewhere.
    sides = [_by_library(Path(each.path)) for each in (pair.facts.reader, pair.folder.reader)]
    computed, aliases = [own, stated], {}
    if not any(isinstance(each, str) for each in sides):
        computed, aliases = [dotted(each.to_dict()) for each in sides], sides[1].attribute_map
    elif not isinstance(sides[0], str):
        yield Remark(DIFFERS, _SETTING, CONFIG_NAME, sides[1])
    mine, theirs, *read = (_spelled(each, aliases) for each in (own, stated, *computed))
    # Where a side states null, a library passes over its default.
    differ = (name for name, _, _ in differing(own, stated))
    for name in dict.fromkeys((*differ, *sorted(own.keys() ^ stated.keys()))):
        key = _spelling(name, aliases)
        values = [each.get(key, [None]) for each in (mine, theirs, *read)]
        shown: Any = values[1][0]
        # The library passes over a name that it keeps of neither side; others may not.
        taken = [each[0] for each in values[2 if any(key in each for each in read) else 0 :]][:2]
        if any(not is_same(each, values[1][0]) for each in values[1]):
            status, shown = DIFFERS, values[1]  # two values, of which each library takes one
        elif is_same(values[0][0], values[1][0]) and is_same(*taken):
            status = EQUAL
        else:
            status = _weight(pair, name, own, stated, taken)
        yield differs(_SETTING, name, values[0][0], shown, status)


def _spelling(name: str, aliases: Mapping[str, str]) -> str:
    """Return the newest name of a setting."""
    name = _SPELLINGS.get(name, name).replace("rope_scaling.", "rope_parameters.")
    return aliases.get(name, name)


def _spelled(table: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the values of settings by their newest names."""
    found: dict[str, list[Any]] = {}
    for name, value in table.items():
        if value is not None:
            found.setdefault(_spelling(name, aliases), []).append(value)
    return found


def _weight(
    pair: Pair,
    name: str,
    own: Mapping[str, Any],
    stated: Mapping[str, Any],
    taken: Sequence[Any],
) -> Status:
    """Return what it means that a key of config.json is not the source's own.

    `taken` are the two values that transformers takes.
    """
    one, other = own.get(name), stated.get(name)
    top, kind = name.partition(".")[0], stated.get("model_type")
    is_same_kind = pair.facts.config.get("model_type") == kind
    changes, is_rotary = not is_same(*taken), top.startswith("rope_")
    if top in _CLASSES:
        is_chosen = other is not None and one is not None and is_same_kind
        return DIFFERS if is_chosen or (top == _CODE and other is not None) else EQUAL
    if top in _TYPES:
        usual, found = (next(filter(None, map(each.get, _TYPES)), None) for each in (own, stated))
        return EQUAL if found in (usual, SOURCE_TYPES[pair.folder.data_type][1]) else UP_TO
    if top == QUANTIZATION and other is not None and any(key.startswith(f"{top}.") for key in own):
        return UP_TO
    weight = _WEIGHTS.get(top, DIFFERS)
    # A library has a default of its own where a side states none.
    is_default = changes and None in (one, other) and None not in taken
    if is_default and not (is_rotary or top.endswith(_TOKEN)) and (top == _ROWS or weight != EQUAL):
        return DIFFERS
    # Without a family, nothing else compares what they decide.
    is_open = pair.config is None and (weight != EQUAL or top in (TIE, _ROWS))
    if top in _WEIGHTS and (changes or weight != DIFFERS) and not is_open:
        return weight
    if not changes:
        return EQUAL
    if pair.config is None:
        return DIFFERS
    table = huggingface_table()
    known = table.get(str(kind), {}).get(top) or table["*"].get(top, KnownSetting("none", ()))
    is_read, values = known.use == "read", [each for each in (one, other) if each is not None]
    if not is_same_kind or not (is_read or any(each not in known.values for each in values)):
        return EQUAL
    # The family has compared all of rotary embeddings, with what an absent parameter means, and
    # otherwise what it reads, which may be another release's spelling; flags may be another
    # library's alone.
    is_flag = top in _DERIVED or any(isinstance(each, bool) for each in values)
    if is_read and is_flag and not is_rotary:
        return DIFFERS
    return EQUAL if is_read and is_rotary else UP_TO


def _unknown(pair: Pair) -> Iterator[Remark]:
    """Yield settings of one side that may change what is computed, and are not the other's.

    A source of another format has names of its own.
    """
    assert pair.plan is not None
    reader, stated = pair.facts.reader, pair.folder.facts.config
    own = reader.settings or pair.facts.config
    found: dict[str, str] = {}
    sides = [(pair.folder.mapping, pair.folder.facts)]
    if reader.format == "huggingface":
        sides.append((pair.plan.mapping, pair.facts))
    elif stated.get(_CODE):
        found[_CODE] = f"{stated[_CODE]!r:.100}: a library may run this code"
    for mapping, facts in sides:
        assert mapping is not None
        with contextlib.suppress(ValueError):  # reported as the folder's configuration
            found |= mapping.obstacles(facts)
    for name, why in found.items():
        if own.get(name) != stated.get(name):
            yield Remark(DIFFERS, _SETTING, name, why)


def _table_rows(pair: Pair) -> Iterator[Remark]:
    """Yield that config.json states another vocabulary than the embedding or head has rows."""
    stated = pair.folder.facts.config.get(_ROWS)
    for written in pair.tensors:
        stored = pair.folder.reader.tensors.get(written.key)
        if stored is None or stated is None or not written.key.endswith(TIED_TABLES):
            continue
        if (rows := stored[0].shape[0]) != stated:
            detail = f"{stated}, and {written.key} has {rows} rows"
            yield Remark(DIFFERS, _SETTING, _ROWS, detail)


def compare_generation(pair: Pair) -> Part:
    """Compare the tokens that end an answer, and the defaults of generation."""
    name = "generation"
    if pair.config is not None and not {"end_id", "eos_token_id"} & vars(pair.config).keys():
        return Part(name, "an encoder, which generates nothing")
    sides = (pair.facts, pair.folder.facts)
    both = all(facts.reader.format == "huggingface" for facts in sides)
    mine, theirs = (
        {**{key: each for key, each in facts.config.items() if both and key.endswith(_TOKEN)},
         **_generation(facts)}
        for facts in sides
    )  # fmt: skip
    files = {name for facts in sides for name in _generation(facts)}
    # A source of another format has no such defaults.
    is_stated = both or GENERATION_FILE in pair.facts.tokenizer
    findings = []
    for key, one, other in differing(mine, theirs):
        is_token = key.endswith(_TOKEN)
        if key not in _WITHOUT_FUNCTION and (mine or not is_token):
            # Libraries have defaults of such tokens in config.json, whatever ends an answer.
            is_default = is_token and key not in files and None in (one, other)
            status = UP_TO if is_default else DIFFERS if is_stated else NOT_COMPUTED
            findings.append(differs(_SETTING, key, one, other, status))
    alone = ", ".join(each.where for each in findings if each.status == UP_TO)
    try:
        ends, found = _ends(pair.facts, pair.config), _ends(pair.folder.facts, pair.folder.config)
    except ValueError as error:
        return Part(name, "", (Remark(DIFFERS, "end tokens", "folder", str(error)),))
    if ends != found:
        status = DIFFERS if ends else NOT_COMPUTED
        findings.append(differs("end tokens", "folder", sorted(ends), sorted(found), status))
    elif lost := _lost_ends(*sides):
        detail = f"{GENERATION_FILE} lacks {lost}, and libraries that read it read no other file"
        findings.append(Remark(DIFFERS, "end tokens", "folder", detail))
    elif not ends:
        findings.append(Remark(EQUAL, "end tokens", "both", "neither side names some"))
    up_to = (f"tokens that one side alone states ({alone})",) if alone else ()
    return Part(name, f"end tokens {sorted(ends)}", tuple(findings), up_to)


def _generation(facts: Facts) -> Mapping[str, Any]:
    file = facts.tokenizer.get(GENERATION_FILE)
    stated = json_file(file) if file else {}
    # False is the default of each flag that decides an answer.
    return {
        name: value
        for name, value in stated.items()
        if value is not False and value != _NEUTRAL.get(name)
    }


def _lost_ends(source: Facts, folder: Facts) -> list[int]:
    """Return the end tokens that the source's file of generation states, and the folder's not."""
    if GENERATION_FILE not in folder.tokenizer:
        return []
    mine, theirs = ({*end_tokens(_generation(each))} for each in (source, folder))
    return sorted(mine - theirs)


def _ends(facts: Facts, config: FTConfig | None) -> set[int]:
    """Return the ids of every token that a server takes for the end of an answer."""
    files = {name: file for name, file in facts.tokenizer.items() if name != GENERATION_FILE}
    found = {*end_tokens(_generation(facts)), *end_tokens(facts.config, "config.json")}
    if isinstance(facts.reader, FTFolder):  # its settings are in config.ini
        found |= {vars(config)[name] for name in ("end_id", "eos_token_id") if name in vars(config)}
    end = special_ids(files).eos
    return found | ({end} if end is not None else set())
