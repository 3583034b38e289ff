"""Compare the settings that affect a model's computation, and the tokens that end its answers."""

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
from export_scripts.families.mapping.text_models import is_vision_language
from export_scripts.numeric.dtypes import SOURCE_TYPES
from foundations.files.json_content import dotted
from foundations.files.yaml_content import read_table
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
    is_same,
    not_computed,
)
from inference.certify.huggingface import import_transformers
from inference.certify.pair import TIE, Pair

_ROWS = "vocab_size"
# Settings that the comparison of tensors covers: where a head is stored, how ranks share heads.
_SHOWN_BY_TENSORS = ("untied_head", "ia3_num_tasks", _ROWS)
_SHOWN_BY_SHARDS = (*_SHOWN_BY_TENSORS, "kv_head_num", "separate_qkv")
_KEYS = read_table(Path(__file__).with_name("settings.yaml"))
_KEY_STATUS = {key: Status(status) for status, keys in _KEYS["status"].items() for key in keys}
_RENAMED, _NEUTRAL, _WITHOUT_EFFECT = (
    _KEYS[name] for name in ("renamed", "neutral", "without_effect")
)
# The classes that a library loads, and remote code that it may run.
_ARCHITECTURES, _CODE = "architectures", "auto_map"
_CLASSES = (_ARCHITECTURES, _CODE)
_TYPES = ("dtype", "torch_dtype")  # the default type of a server's computation
_DERIVED = ("feed_forward_proj",)  # transformers 5 stores the flags that 4 derives from it
_TOKEN = "_token_id"
_SETTING = "setting"
_START = "decoder_start_token_id"


def compare_settings(pair: Pair) -> Part:
    """Compare the settings of both sides, as the family reads them and as config.json has them."""
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
        named = {remark.where for remark in findings}
        findings += [remark for remark in _config_keys(pair) if remark.where not in named]
    names = [remark.where for remark in findings if remark.status == UP_TO]
    up_to = (f"settings that the comparison does not depend on ({', '.join(names)})",)
    return Part("settings", compared, tuple(findings), up_to if names else ())


def _architectures(source: FTConfig, folder: FTConfig, shown: Sequence[str]) -> Iterator[Remark]:
    try:
        settings = [
            {**dataclasses.asdict(config.architecture()), _START: vars(config).get(_START)}
            for config in (source, folder)
        ]
    except ValueError as error:
        yield Remark(DIFFERS, _SETTING, "architecture", str(error))
        return
    for name, one, other in differing(*settings):
        if name.partition(".")[0] not in shown:
            yield differs(_SETTING, name, one, other)
    # Shards answer an empty prompt from start_id; in other folders it belongs to the tokenizer.
    one, other = (vars(config).get("start_id") for config in (source, folder))
    if one != other and shown is _SHOWN_BY_SHARDS:
        yield differs(_SETTING, "start_id", one, other, UP_TO)


def _other_class(pair: Pair) -> Iterator[Remark]:
    """Yield a remark if config.json names another class than transformers has for the model."""
    mapping, stated = pair.folder.mapping, pair.folder.facts.config
    if mapping is None or mapping.written is None or pair.config is None:
        return
    usual = [
        config[_ARCHITECTURES]
        for is_tied in (False, True)
        for config in mapping.written(pair.config, is_tied)
        if config.get("model_type") == stated.get("model_type", "")
    ]
    found = stated.get(_ARCHITECTURES)
    if usual and found is not None and found not in usual:
        detail = f"{found!r:.100}, and {usual[0]!r} is the class of such a model"
        yield Remark(DIFFERS, _SETTING, _ARCHITECTURES, detail)


def _loaded_config(path: Path) -> Any:
    """Return the configuration that transformers loads, or a string with the reason why not."""
    try:
        kind = import_transformers().AutoConfig
        return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # malformed files, or a model that transformers does not know
        return f"transformers does not read it: {error}"


def _config_keys(pair: Pair) -> Iterator[Remark]:
    """Yield a remark for every key of config.json that the two sides state differently."""
    source, folder = (
        dotted(json_file(Path(reader.path, CONFIG_NAME)))
        for reader in (pair.facts.reader, pair.folder.reader)
    )
    if is_vision_language(source):
        return  # the text model has its settings in another table; the families compare them
    configs = [_loaded_config(Path(side.path)) for side in (pair.facts.reader, pair.folder.reader)]
    computed, aliases = [source, folder], {}
    if not any(isinstance(config, str) for config in configs):
        computed = [dotted(config.to_dict()) for config in configs]
        aliases = configs[1].attribute_map
    elif not isinstance(configs[0], str):
        yield Remark(DIFFERS, _SETTING, CONFIG_NAME, configs[1])
    tables = [_by_current_name(table, aliases) for table in (source, folder, *computed)]
    # A stated null is not the same as a missing key: it replaces the library's default.
    differ = (name for name, _, _ in differing(source, folder))
    for name in dict.fromkeys((*differ, *sorted(source.keys() ^ folder.keys()))):
        key = _current_name(name, aliases)
        values = [table.get(key, [None]) for table in tables]
        shown: Any = folder.get(name)
        # transformers drops a key that it keeps for neither side; other libraries may use it.
        is_loaded = any(key in table for table in tables[2:])
        loaded = [value[0] for value in (values[2:] if is_loaded else values[:2])]
        if any(not is_same(value, values[1][0]) for value in values[1]):
            status, shown = DIFFERS, values[1]  # two spellings with two values: releases disagree
        elif is_same(values[0][0], values[1][0]) and is_same(*loaded):
            status = EQUAL
        else:
            status = _key_status(pair, name, source, folder, loaded)
        yield differs(_SETTING, name, source.get(name), shown, status)


def _current_name(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name of a setting in the newest release of transformers."""
    name = _RENAMED.get(name, name).replace("rope_scaling.", "rope_parameters.")
    return aliases.get(name, name)


def _by_current_name(table: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, list[Any]]:
    """Group the values of settings by their current name; spellings of one setting are a group."""
    found: dict[str, list[Any]] = {}
    for name, value in table.items():
        if value is not None:
            found.setdefault(_current_name(name, aliases), []).append(value)
    return found


def _key_status(
    pair: Pair,
    name: str,
    source: Mapping[str, Any],
    folder: Mapping[str, Any],
    loaded: Sequence[Any],
) -> Status:
    """Return the status of a key of config.json that the two sides state differently.

    `loaded` are the source's and the folder's value as transformers loads them.
    """
    one, other = source.get(name), folder.get(name)
    top, kind = name.partition(".")[0], folder.get("model_type")
    is_same_kind = pair.facts.config.get("model_type") == kind
    changes, is_rotary = not is_same(*loaded), top.startswith("rope_")
    if top in _CLASSES:
        is_chosen = other is not None and one is not None and is_same_kind
        return DIFFERS if is_chosen or (top == _CODE and other is not None) else EQUAL
    if top in _TYPES:
        usual, found = (
            next(filter(None, map(side.get, _TYPES)), None) for side in (source, folder)
        )
        return EQUAL if found in (usual, SOURCE_TYPES[pair.folder.data_type][1]) else UP_TO
    is_quantised = any(key.startswith(f"{QUANTIZATION}.") for key in source)
    if top == QUANTIZATION and other is not None and is_quantised:
        return UP_TO
    status = _KEY_STATUS.get(top, DIFFERS)
    # One side relies on the library's default.
    is_default = changes and None in (one, other) and None not in loaded
    if is_default and not (is_rotary or top.endswith(_TOKEN)) and (top == _ROWS or status != EQUAL):
        return DIFFERS
    # Without a family, no other part compares these keys.
    is_open = pair.config is None and (status != EQUAL or top in (TIE, _ROWS))
    if top in _KEY_STATUS and (changes or status != DIFFERS) and not is_open:
        return status
    if not changes:
        return EQUAL
    if pair.config is None:
        return DIFFERS
    table = huggingface_table()
    known = table.get(str(kind), {}).get(top) or table["*"].get(top, KnownSetting("none", ()))
    is_read, values = known.use == "read", [each for each in (one, other) if each is not None]
    if not is_same_kind or not (is_read or any(each not in known.values for each in values)):
        return EQUAL
    # The family has compared the rotary embedding completely, including defaults of missing
    # parameters. Other keys that it reads may be spellings of another release, so they are a bound;
    # flags differ, because another library may be the only one that reads them.
    is_flag = top in _DERIVED or any(isinstance(each, bool) for each in values)
    if is_read and is_flag and not is_rotary:
        return DIFFERS
    return EQUAL if is_read and is_rotary else UP_TO


def _unknown(pair: Pair) -> Iterator[Remark]:
    """Yield settings that no family knows, may affect the computation, and differ.

    The source's settings are read only in Hugging Face folders: other formats have other names.
    """
    assert pair.plan is not None
    reader, stated = pair.facts.reader, pair.folder.facts.config
    source = reader.settings or pair.facts.config
    found: dict[str, str] = {}
    sides = [(pair.folder.mapping, pair.folder.facts)]
    if reader.format == "huggingface":
        sides.append((pair.plan.mapping, pair.facts))
    elif stated.get(_CODE):
        found[_CODE] = f"{stated[_CODE]!r:.100}: a library may run this code"
    for mapping, facts in sides:
        assert mapping is not None
        with contextlib.suppress(ValueError):  # `open_folder` reports it
            found |= mapping.obstacles(facts)
    for name, reason in found.items():
        if source.get(name) != stated.get(name):
            yield Remark(DIFFERS, _SETTING, name, reason)


def _table_rows(pair: Pair) -> Iterator[Remark]:
    """Yield a remark if vocab_size is not the number of rows of the embedding or head."""
    stated = pair.folder.facts.config.get(_ROWS)
    for written in pair.tensors:
        stored = pair.folder.reader.tensors.get(written.key)
        if stored is None or stated is None or not written.key.endswith(TIED_TABLES):
            continue
        if (rows := stored[0].shape[0]) != stated:
            detail = f"{stated}, and {written.key} has {rows} rows"
            yield Remark(DIFFERS, _SETTING, _ROWS, detail)


def compare_generation(pair: Pair) -> Part:
    """Compare the tokens that end an answer, and the generation defaults."""
    name = "generation"
    if pair.config is not None and not {"end_id", "eos_token_id"} & vars(pair.config).keys():
        return Part(name, "an encoder, which generates nothing")
    sides = (pair.facts, pair.folder.facts)
    both = all(facts.reader.format == "huggingface" for facts in sides)
    source, folder = (
        {**{key: id_ for key, id_ in facts.config.items() if both and key.endswith(_TOKEN)},
         **_generation(facts)}
        for facts in sides
    )  # fmt: skip
    files = {name for facts in sides for name in _generation(facts)}
    # Formats other than Hugging Face's have no such defaults.
    is_stated = both or GENERATION_FILE in pair.facts.tokenizer
    findings = []
    for key, one, other in differing(source, folder):
        is_token = key.endswith(_TOKEN)
        if key not in _WITHOUT_EFFECT and (source or not is_token):
            # In config.json these tokens are defaults of libraries, which need not end an answer.
            is_default = is_token and key not in files and None in (one, other)
            status = UP_TO if is_default else DIFFERS if is_stated else NOT_COMPUTED
            findings.append(differs(_SETTING, key, one, other, status))
    try:
        ends, found = _ends(pair.facts, pair.config), _ends(pair.folder.facts, pair.folder.config)
        one, other = (end_tokens(facts.config, CONFIG_NAME) for facts in sides)
    except ValueError as error:
        return Part(name, "", (Remark(DIFFERS, "end tokens", "folder", str(error)),))
    if both and one and other and {*one}.isdisjoint(other):
        # Some libraries read no other file, and a program may keep the first of several alone.
        where = f"{CONFIG_NAME}, eos_token_id"
        findings.append(differs(_SETTING, where, one, other, UP_TO))
    alone = ", ".join(each.where for each in findings if each.status == UP_TO)
    if ends != found:
        status = DIFFERS if ends else NOT_COMPUTED
        findings.append(differs("end tokens", "folder", sorted(ends), sorted(found), status))
    elif lost := _lost_ends(*sides):
        detail = f"{GENERATION_FILE} lacks {lost}; libraries that read it read no other file"
        findings.append(Remark(DIFFERS, "end tokens", "folder", detail))
    elif not ends:
        findings.append(Remark(EQUAL, "end tokens", "both", "neither side names any"))
    up_to = (f"tokens that only one side states ({alone})",) if alone else ()
    return Part(name, f"end tokens {sorted(ends)}", tuple(findings), up_to)


def _generation(facts: Facts) -> Mapping[str, Any]:
    file = facts.tokenizer.get(GENERATION_FILE)
    stated = json_file(file) if file else {}
    # False is the default of every flag that affects an answer.
    return {
        name: value
        for name, value in stated.items()
        if value is not False and value != _NEUTRAL.get(name)
    }


def _lost_ends(source: Facts, folder: Facts) -> list[int]:
    """Return the end tokens of the source's generation_config.json that the folder's lacks."""
    if GENERATION_FILE not in folder.tokenizer:
        return []
    expected, found = ({*end_tokens(_generation(facts))} for facts in (source, folder))
    return sorted(expected - found)


def _ends(facts: Facts, config: FTConfig | None) -> set[int]:
    """Return the ids of all tokens at which a server ends an answer."""
    files = {name: file for name, file in facts.tokenizer.items() if name != GENERATION_FILE}
    found = {*end_tokens(_generation(facts)), *end_tokens(facts.config, "config.json")}
    if isinstance(facts.reader, FTFolder):  # its settings are in config.ini
        found |= {vars(config)[name] for name in ("end_id", "eos_token_id") if name in vars(config)}
    end = special_ids(files).eos
    return found | ({end} if end is not None else set())
