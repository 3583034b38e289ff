"""The tokenizer of a Hugging Face folder: copied, or built from the source's files and compared.

A Hugging Face tokenizer is copied byte for byte. Any other becomes a tokenizer.json, whose IDs and
decoded texts are compared with those of the source's library.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import Remarks, json_table
from export_scripts.conversion.plan import Contents, ConversionPlan
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.families.table import SOURCE_MAPPINGS
from export_scripts.ft import fast_tokenizers
from export_scripts.ft.tokenizer_files import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TEMPLATES_FOLDER,
    tokenizer_errors,
)
from export_scripts.sentencepiece_model import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    read_sentencepiece,
)
from foundations.errors import CheckpointMismatchError, first_names, refuse
from foundations.files.json_content import Fields, Table, json_bytes, nested, without_nulls

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

# The user allows this name to leave the tokenizer out.
TOKENIZER = "tokenizer"
_WHOLE = "tokenizer.json"
_GENERATION = "generation_config.json"
# The only class with which transformers 4 and 5 both use a tokenizer.json unchanged.
_CLASS = "PreTrainedTokenizerFast"
# Type of model -> the class that transformers 5 always loads for it.
_FORCED = {"qwen2": "Qwen2Tokenizer"}
# Settings of the source that do not depend on the form of the vocabulary.
_KEPT_SETTINGS = ("chat_template", "model_max_length", "padding_side")
_MAX_DIFFERENCES, _MAX_SHOWN = 3, 16
_MAX_PIECES = 2000
# Kinds of pieces that are not built by merging others.
_SYMBOLS = (USER_DEFINED, CONTROL, UNUSED)


def with_tokenizer(plan: ConversionPlan) -> ConversionPlan:
    """Return the plan of a Hugging Face folder with its tokenizer's files.

    Raises:
        CheckpointMismatchError: The tokenizer cannot be written, and leaving it out is not allowed.
    """
    source = plan.facts.reader.path
    rest = {name: data for name, data in plan.extra_files.items() if not _is_tokenizer(plan, name)}
    left = tuple(_not_copied(plan))
    try:
        files, remarks = _files(plan)
    except ValueError as error:
        problems = str(error).split("\n")
        if not plan.request.allows(TOKENIZER):
            allow = f"; or leave the tokenizer out ({plan.request.names['allow']} {TOKENIZER})"
            raise CheckpointMismatchError(
                f"{source}: {problem}{allow}" for problem in problems
            ) from error
        files = {}
        remarks = tuple(f"the tokenizer is left out: {problem}" for problem in problems)
    return dataclasses.replace(
        plan, extra_files=rest | files, remarks=(*plan.remarks, *left, *remarks)
    )


def _is_tokenizer(plan: ConversionPlan, name: str) -> bool:
    return name in plan.facts.tokenizer and name != _GENERATION


def _files(plan: ConversionPlan) -> tuple[Contents, Remarks]:
    """Return the tokenizer's files and remarks about them.

    Raises:
        ValueError: The tokenizer cannot be written; each line is a reason.
    """
    files = {name: data for name, data in plan.extra_files.items() if _is_tokenizer(plan, name)}
    if not files:
        return {}, ()
    settings = _settings(files)
    is_given = bool(plan.request.vocab_path or plan.request.merges_path)
    is_own = not is_given and ("tokenizer_class" in settings or _is_huggingface(plan))
    if not is_own or not _is_huggingface(plan):
        _check_class(plan, settings)
    if "auto_map" in settings:
        raise ValueError(
            f"{SETTINGS_FILE} names the publisher's code (auto_map), which is not copied"
        )
    if _WHOLE not in files and not is_own:
        return _built_files(plan, files, settings)
    remarks = _check_rows(plan, json_table(files[_WHOLE], _WHOLE)) if _WHOLE in files else ()
    if _WHOLE in files and (is_given or "tokenizer_class" not in settings):
        files[SETTINGS_FILE] = json_bytes({**settings, "tokenizer_class": _CLASS})
    return {_copied_name(plan, name): data for name, data in files.items()}, remarks


def _check_class(plan: ConversionPlan, settings: Table) -> None:
    """Check that transformers loads the tokenizer with the class that its folder states.

    For some models, release 5 ignores the folder's class: see
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in its tokenization_auto.py.

    Raises:
        ValueError: transformers 5 uses another class.
    """
    kind = json_table(plan.extra_files["config.json"], "config.json")["model_type"]
    own, stated = _FORCED.get(kind), str(settings.get("tokenizer_class", _CLASS))
    if own is not None and stated.removesuffix("Fast") != own:
        raise ValueError(
            f"transformers 5 loads the tokenizer of every {kind} as a {own}, which would give "
            "other IDs"
        )


def _settings(files: Contents) -> Fields:
    return json_table(files[SETTINGS_FILE], SETTINGS_FILE) if SETTINGS_FILE in files else {}


def _is_huggingface(plan: ConversionPlan) -> bool:
    """Return whether a source is a Hugging Face folder, or shards made from one."""
    reader = plan.facts.reader
    origin = reader.origin or plan.mapping.name
    return any(
        mapping.name == origin and mapping.format == "huggingface" for mapping in SOURCE_MAPPINGS
    )


def _copied_name(plan: ConversionPlan, name: str) -> str:
    """Return a copied file's name in the source's folder, or the name that transformers reads."""
    if plan.facts.reader.format == "huggingface" and "/" not in name:
        own = plan.facts.tokenizer.get(name)
        if own is not None and own.path.parent == plan.facts.reader.home:
            return own.path.name
    is_t5 = plan.mapping.family.name.startswith("t5")
    return "spiece.model" if is_t5 and name == "tokenizer.model" else name


def _not_copied(plan: ConversionPlan) -> Iterator[str]:
    """Yield a remark that names the files of a Hugging Face folder that are not copied."""
    reader = plan.facts.reader
    if reader.format != "huggingface" or not reader.home.is_dir():
        return
    kept = {*reader.files, *(file.path for file in plan.facts.tokenizer.values())}
    kept |= {path.parent for path in kept} | {path.with_suffix("") for path in kept}
    names = [
        entry.name
        for entry in sorted(reader.home.iterdir())
        if entry not in kept
        and not entry.name.startswith(".")
        and not entry.name.endswith((".index.json", ".safetensors", ".bin"))
    ]
    if names:
        yield f"not copied from {reader.home}: {first_names(names)}"


def _check_rows(plan: ConversionPlan, tokenizer: Table) -> Remarks:
    """Check the IDs of a tokenizer.json against the embedding's rows.

    Added tokens may exceed them, as tokens of images do in text-only releases; a remark names them.

    Raises:
        ValueError: IDs of the vocabulary exceed the rows, or are not numbers.
    """
    vocabulary = nested(tokenizer, "model", "vocab")
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        raise ValueError(f"{_WHOLE} holds no vocabulary")
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"{_WHOLE} has an id that is not a number")
    _check_last_id(plan, max(ids))
    rows = _rows(plan)
    added = tokenizer.get("added_tokens")
    beyond = [
        f"{token.get('content')!r:.40} ({token['id']})"
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and isinstance(token.get("id"), int)
        if rows is not None and token["id"] >= rows
    ]
    if not beyond:
        return ()
    return (
        f"the tokenizer has added tokens beyond the embedding's {rows} rows, and a text with one "
        f"of them fails: {first_names(beyond)}",
    )


def _rows(plan: ConversionPlan) -> int | None:
    return vars(plan.config).get("vocab_size")


def _check_last_id(plan: ConversionPlan, last: int) -> None:
    rows = _rows(plan)
    if rows is not None and last >= rows:
        raise ValueError(
            f"the tokenizer has IDs up to {last}, but the model's embedding has {rows} rows: it is "
            "the tokenizer of another model"
        )


def _built_files(
    plan: ConversionPlan, files: Contents, settings: Table
) -> tuple[Contents, Remarks]:
    backend, unknown = _checked_tokenizer(files, _stated_case(plan, settings))
    _check_last_id(plan, max(backend.get_vocab(with_added_tokens=True).values()))
    special = {
        token.content: index
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    names = _special_names(plan, unknown, special)
    _add_markers(plan, backend, settings, special, names)
    kept = {
        name: data
        for name, data in files.items()
        if name == TEMPLATE_FILE or name.startswith(TEMPLATES_FOLDER)
    }
    has_template = bool(kept) or "chat_template" in settings
    table = {
        **{key: settings[key] for key in _KEPT_SETTINGS if key in settings},
        "tokenizer_class": _CLASS,
        "clean_up_tokenization_spaces": False,
        # A special token's spelling in a text stays text, as in the source's library, unless a chat
        # template writes such spellings as tokens.
        "split_special_tokens": not has_template,
        **names,
    }
    whole = backend.to_str(pretty=True).encode()
    return {**kept, _WHOLE: whole, SETTINGS_FILE: json_bytes(table)}, ()


def _stated_case(plan: ConversionPlan, settings: Table) -> bool | None:
    """Return whether a source states that its WordPiece lowercases texts; None if not stated."""
    own = plan.facts.config.get("tokenizer")
    kind = own.get("type") if isinstance(own, Mapping) else plan.facts.config.get("tokenizer_type")
    # BertWordPieceCase or BertWordPieceLowerCase in NeMo and Megatron-LM.
    stated = str(kind).endswith("LowerCase") if str(kind).endswith("Case") else None
    flag = settings.get("do_lower_case")
    return flag if isinstance(flag, bool) else stated


def _checked_tokenizer(files: Contents, is_lower: bool | None) -> tuple["Tokenizer", str | None]:
    """Return a tokenizer built from a source's files, and its unknown token.

    A SentencePiece model is compared with its library. GPT-2's byte pairs, which the source's
    library computes by the same rules, must decode to each text.

    Raises:
        ValueError: The result differs, or the tokenizers library has no equal.
    """
    problems: list[str] = []
    try:
        with tokenizer_errors():
            backend, unknown = _build(files, is_lower, problems)
    except ValueError as error:
        raise ValueError(f"its tokenizer has no equal in a tokenizer.json: {error}") from error
    refuse(problems)
    return backend, unknown


def _build(
    files: Contents, is_lower: bool | None, problems: list[str]
) -> tuple["Tokenizer", str | None]:
    unknown = None
    if "tokenizer.model" in files:
        from sentencepiece import SentencePieceProcessor

        data = files["tokenizer.model"]
        model, reference = read_sentencepiece(data), SentencePieceProcessor(model_proto=data)
        backend = fast_tokenizers.sentencepiece_tokenizer(model)
        unknown = reference.id_to_piece(reference.unk_id())
        backend.encode_special_tokens = True
        problems += _differences(backend, reference, (*PROBES, *_piece_probes(model)))
    elif {"vocab.json", "merges.txt"} <= files.keys():
        backend = fast_tokenizers.gpt2_tokenizer(files["vocab.json"], files["merges.txt"].decode())
        backend.encode_special_tokens = True
        problems += _round_trip_problems(backend)
    elif "vocab.txt" in files:
        backend = fast_tokenizers.wordpiece_tokenizer(files["vocab.txt"], is_lower=is_lower)
        unknown = "[UNK]"
    else:
        raise ValueError(f"{first_names(sorted(files))} are not a tokenizer's vocabulary")
    backend.encode_special_tokens = True
    return backend, unknown


def _round_trip_problems(backend: "Tokenizer") -> list[str]:
    """Return a problem for each text that a byte-level tokenizer does not decode to itself.

    One that lacks a byte is not checked.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    if not backend.get_vocab().keys() >= {*ByteLevel.alphabet()}:
        return []
    ids = {text: backend.encode(text, add_special_tokens=False).ids for text in PROBES}
    back = {text: backend.decode(ids[text], skip_special_tokens=False) for text in PROBES}
    return [
        f"{text!r:.80} comes back as {back[text]!r:.80}" for text in PROBES if back[text] != text
    ]


def _piece_probes(model: Any) -> Iterator[str]:
    """Yield texts made of a SentencePiece model's symbols and pieces."""
    special = fast_tokenizers.piece_texts(model, *_SYMBOLS)[:_MAX_PIECES]
    pieces = fast_tokenizers.piece_texts(model, NORMAL)
    usual = pieces[:: max(1, len(pieces) // _MAX_PIECES)]
    yield from special
    yield from (f"x{text}y {text}" for text in special)
    yield "".join(special)
    for at in range(0, len(usual), 8):
        yield "".join(usual[at : at + 8])
        yield " ".join(usual[at : at + 8])


def _differences(
    backend: "Tokenizer", reference: "SentencePieceProcessor", texts: Iterable[str]
) -> list[str]:
    """Return a problem for each text whose IDs, or their decoded text, differ from the source's."""
    found = []
    for text in texts:
        ids, wanted = backend.encode(text, add_special_tokens=False).ids, reference.encode(text)
        back = backend.decode(wanted, skip_special_tokens=False)
        if ids != wanted:
            found.append(
                f"{text!r:.80} has the IDs {_shown(wanted)} in sentencepiece, {_shown(ids)}"
            )
        elif back != reference.decode(wanted):
            found.append(
                f"{text!r:.80} is decoded as {reference.decode(wanted)!r:.80} by sentencepiece, "
                f"{back!r:.80}"
            )
    more = len(found) - _MAX_DIFFERENCES
    return [
        f"{difference} in a tokenizer.json made from it" for difference in found[:_MAX_DIFFERENCES]
    ] + ([f"{more} more texts differ"] if more > 0 else [])


def _shown(ids: Sequence[int]) -> str:
    more = len(ids) - _MAX_SHOWN
    return f"{list(ids[:_MAX_SHOWN])}" + (f" and {more} more" if more > 0 else "")


def _special_names(
    plan: ConversionPlan, unknown: str | None, special: Mapping[str, int]
) -> dict[str, str]:
    """Return the settings that name special tokens: (`bos_token` etc. -> text)."""
    known, fields = plan.facts.special_ids(), vars(plan.config)
    texts = {index: text for text, index in special.items()}
    ids = {
        "bos_token": (fields.get("start_id"), known.bos),
        "eos_token": (fields.get("end_id"), fields.get("eos_token_id"), known.eos),
        "pad_token": (fields.get("pad_id"), known.pad),
    }
    names = {
        name: next((texts[index] for index in found if index in texts), None)
        for name, found in ids.items()
    }
    names["unk_token"] = unknown
    return without_nulls(names)


def _add_markers(
    plan: ConversionPlan,
    backend: "Tokenizer",
    settings: Table,
    special: Mapping[str, int],
    names: Mapping[str, str],
) -> None:
    """Make the tokenizer add the tokens around a text that the family or its settings require."""
    from tokenizers import processors

    family = plan.mapping.family.name
    wanted = (
        ("bos_token", settings.get("add_bos_token", False)),
        ("eos_token", settings.get("add_eos_token", family.startswith("t5"))),
    )
    if missing := [name for name, is_wanted in wanted if is_wanted and name not in names]:
        raise ValueError(f"the vocabulary lacks {', '.join(missing)}, which every text needs")
    before, after = ([names[name]] if is_wanted else [] for name, is_wanted in wanted)
    if family == "bert" and {"[CLS]", "[SEP]"} <= special.keys():
        before, after = ["[CLS]"], ["[SEP]"]
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(token, special[token]) for token in (*before, *after)],
        )
