"""Compare tokenizers by the ids of probe texts, and chat templates by what they render."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import Region, json_table, read_small
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.ft.tokenizer_files import SETTINGS_FILE
from inference.backend.tokenizer import load_tokenizer
from inference.certify.activations import NoLibraryError
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark
from inference.certify.huggingface import import_transformers
from inference.certify.pair import Pair
from inference.front.guard import RejectedError
from inference.front.openai.codec import ChatTemplate, load_chat_template

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_USER = {"role": "user", "content": "Why is the sky blue?"}
_SYSTEM = {"role": "system", "content": "You answer in one sentence."}
_ANSWER = {"role": "assistant", "content": "  Because of Rayleigh scattering.\n"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris"}},
        }
    ],
}
_RESULT = {"role": "tool", "content": "18", "name": "weather", "tool_call_id": "call00001"}
_CHATS: Mapping[str, tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]] = {
    "one turn": ((_USER,), {}),
    "system turn": ((_SYSTEM, _USER), {}),
    "several turns": ((_SYSTEM, _USER, _ANSWER, _USER), {}),
    "two answers": ((_USER, _ANSWER, _USER, _ANSWER, _USER), {}),
    "tools": ((_SYSTEM, _USER), {"tools": [_TOOL]}),
    "a call": ((_USER, _CALL, _RESULT), {}),
    "developer turn": (({**_SYSTEM, "role": "developer"}, _USER), {}),
    "reasoning": ((_USER, {**_ANSWER, "reasoning_content": "Air scatters blue."}, _USER), {}),
    "last reasoning": ((_USER, {**_ANSWER, "reasoning_content": "Air scatters blue."}), {}),
    "with thinking": ((_SYSTEM, _USER), {"enable_thinking": True, "thinking": True}),
    "without thinking": ((_SYSTEM, _USER), {"enable_thinking": False, "thinking": False}),
}
_MOST_SHOWN = 12
_MOST_ADDED = 64  # tokens that probe texts are made of
# Compared by themselves.
_COMPARED = ("model", "model.vocab", "model.merges", "version")
# Written by each release of transformers in its own way, or compared by themselves.
_OF_CLASSES = (
    "added_tokens_decoder", "auto_map", "backend", "chat_template", "is_local", "name_or_path",
    "processor_class", "special_tokens_map_file", "tokenizer_class", "tokenizer_file",
    "transformers_version", "local_files_only",
)  # fmt: skip


@dataclass(frozen=True)
class _Encoder:
    """A loaded tokenizer.

    Attributes:
        encode: ids of a text, without and with the markers that the tokenizer adds.
        tokens: the count of its ids, from 0 to the largest.
        vocabulary: token -> id, where the library has it.
        decode: text of ids, without and with the special tokens.
        special: roles of special tokens, such as eos_token -> the token.
    """

    library: str
    encode: Callable[[str, bool], list[int]]
    tokens: int
    vocabulary: Mapping[str, int]
    decode: Callable[[list[int], bool], str]
    special: Mapping[str, Any]


def _load(folder: Path) -> _Encoder:
    """Load the tokenizer in a folder: by transformers where the folder names a class of it.

    Raises:
        ValueError: it cannot be loaded.
    """
    if (folder / SETTINGS_FILE).is_file():
        with contextlib.suppress(NoLibraryError):
            return _load_by_transformers(folder)
    found = load_tokenizer(folder)
    return _Encoder(
        "Slipway",
        lambda text, special: list(found.encode(text, special=special)),
        found.vocab_size,
        {},
        lambda ids, _: found.decode(ids),
        {},
    )


def _load_by_transformers(folder: Path) -> _Encoder:
    transformers = import_transformers()
    try:
        own = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # files can hold anything
        raise ValueError(f"transformers cannot load the tokenizer: {error}") from error
    known = own.get_vocab()
    return _Encoder(
        f"transformers {transformers.__version__}",
        lambda text, special: list(own.encode(text, add_special_tokens=special)),
        max(known.values(), default=-1) + 1,
        known,
        lambda ids, special: own.decode(ids, skip_special_tokens=not special),
        own.special_tokens_map,
    )


@dataclass(frozen=True)
class Texts:
    """Findings about the texts of both sides.

    Attributes:
        tokens: ids of the source's tokenizer; None where it has none.
    """

    parts: tuple[Part, ...]
    tokens: int | None


def compare_texts(pair: Pair) -> Texts:
    """Compare the tokenizers and the chat templates of both sides."""
    with tempfile.TemporaryDirectory() as scratch:
        sides = []
        for name, facts in (("source", pair.facts), ("folder", pair.folder.facts)):
            folder = Path(scratch, name)
            _write(facts.tokenizer, facts.config, folder)
            sides.append(folder)
        own, other = sides
        tokenizers, tokens = _tokenizers(own, other)
        return Texts((tokenizers, _templates(own, other)), tokens)


def _write(files: Mapping[str, Region], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(read_small(file))
    if kind := config.get("model_type"):  # by which transformers chooses a class
        (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _tokenizers(source: Path, folder: Path) -> tuple[Part, int | None]:
    name = "tokenizer"
    has = [_has_tokenizer(each) for each in (source, folder)]
    if not any(has):
        return Part(name, "no tokenizer on either side"), None
    if not has[0]:
        absent = Remark(NOT_COMPUTED, "no tokenizer", "source", "it has none to compare with")
        return Part(name, "", (absent,)), None
    try:
        mine = _load(source)
    except ValueError as error:
        return Part(name, "", (Remark(NOT_COMPUTED, "not loaded", "source", str(error)),)), None
    if not has[1]:
        return Part(name, "", (Remark(DIFFERS, "missing", "folder", "no tokenizer"),)), mine.tokens
    try:
        theirs = _load(folder)
    except ValueError as error:
        return Part(name, "", (Remark(DIFFERS, "not loaded", "folder", str(error)),)), mine.tokens
    probes = (*PROBES, *_around_added_tokens(source))
    findings = (
        *_differences(mine, theirs, probes),
        *_merges(source, folder),
        *_spellings(source, folder),
    )
    up_to = [each.where for each in findings if each.status == UP_TO]
    compared = f"{len(probes)} probe texts, {mine.library} and {theirs.library}"
    words = (f"another wording of the tokenizer ({', '.join(up_to)})",) if up_to else ()
    return Part(name, compared, findings, words), mine.tokens


def _around_added_tokens(source: Path) -> Iterator[str]:
    """Yield texts with the tokens that a tokenizer finds before it splits a text."""
    file = source / "tokenizer.json"
    added = json_table(file.read_bytes(), file).get("added_tokens") if file.is_file() else ()
    for each in (added or ())[:_MOST_ADDED]:
        yield f"a {each['content']} b{each['content']}c"
        yield f"{each['content']}".upper()


def _differences(mine: _Encoder, theirs: _Encoder, probes: Sequence[str]) -> Iterator[Remark]:
    found = []
    both = bool(mine.vocabulary and theirs.vocabulary)
    for special in (False, True)[: 1 + both]:  # files alone do not say what markers there are
        for text in probes:
            ids, others = mine.encode(text, special), theirs.encode(text, special)
            if ids != others:
                shown = f"{others[:_MOST_SHOWN]}, and {ids[:_MOST_SHOWN]} in the source"
                found.append(Remark(DIFFERS, "ids", f"{text!r:.60}", shown))
            elif both and mine.decode(ids, special) != theirs.decode(ids, special):
                shown = f"{theirs.decode(ids, special)!r:.60}, and otherwise in the source"
                found.append(Remark(DIFFERS, "text of ids", f"{text!r:.60}", shown))
    yield from found[:_MOST_SHOWN]
    if more := len(found[_MOST_SHOWN:]):
        yield Remark(DIFFERS, "ids", f"{more} more texts", "other ids")
    if both:
        for role in dict.fromkeys((*mine.special, *theirs.special)):
            if (one := mine.special.get(role)) != (other := theirs.special.get(role)):
                yield Remark(
                    DIFFERS, "special token", role, f"{other!r}, and {one!r} in the source"
                )
    if both and (odd := mine.vocabulary.items() ^ theirs.vocabulary.items()):
        words = sorted({token for token, _ in odd})
        detail = f"{len(words)} tokens have other ids, or are on one side alone: " + ", ".join(
            f"{word!r:.30}" for word in words[:_MOST_SHOWN]
        )
        yield Remark(DIFFERS, "vocabulary", "folder", detail)


def _merges(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield that two tokenizers join pieces otherwise, which few texts may show."""
    files = [each / "tokenizer.json" for each in (source, folder)]
    if all(file.is_file() for file in files):
        mine, theirs = (
            [each if isinstance(each, str) else " ".join(each) for each in model.get("merges", ())]
            for model in (json_table(file.read_bytes(), file).get("model") or {} for file in files)
        )
        if mine != theirs:
            count = len(set(mine) ^ set(theirs))
            detail = f"{count} are on one side alone" if count else "they are in another order"
            yield Remark(DIFFERS, "merges", "tokenizer.json", detail)


def _spellings(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield what is written otherwise, and changes neither the ids nor the texts of the probes."""
    for name, passed in (("tokenizer.json", _COMPARED), (SETTINGS_FILE, _OF_CLASSES)):
        files = [each / name for each in (source, folder)]
        if not all(file.is_file() for file in files):
            continue
        mine, theirs = (json_table(file.read_bytes(), file) for file in files)
        for table in (mine, theirs):
            if isinstance(table.get("model"), dict):
                table |= {f"model.{key}": value for key, value in table["model"].items()}
        for key in dict.fromkeys((*mine, *theirs)):
            if key not in passed and (one := mine.get(key)) != (other := theirs.get(key)):
                detail = f"{other!r:.100}, and {one!r:.100} in the source"
                yield Remark(UP_TO, "another wording", f"{name}, {key}", detail)


def _texts_of_templates(folder: Path) -> dict[str, str]:
    """Return every template of a folder by its place: libraries choose among several."""
    settings = folder / SETTINGS_FILE
    stated = json_table(settings.read_bytes(), settings) if settings.is_file() else {}
    own = stated.get("chat_template")
    named = own if isinstance(own, list) else [{"name": "default", "template": own}]
    found = {
        f"template {each.get('name')}": each["template"]
        for each in named
        if isinstance(each, dict) and isinstance(each.get("template"), str)
    }
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        found[f"template {path.stem}"] = path.read_text(encoding="utf-8")
    return found


def _others(source: Path, folder: Path, mine: str, theirs: str) -> Iterator[Remark]:
    """Yield the templates that stand next to the default one, and are not the source's."""
    own, found = map(_texts_of_templates, (source, folder))
    for name in dict.fromkeys((*own, *found)):
        one, other = own.get(name, mine), found.get(name, theirs)
        if one != other and (one, other) != (mine, theirs):
            detail = "some libraries take it, and it is not the source's"
            yield Remark(DIFFERS, "template", name, detail)


def _templates(source: Path, folder: Path) -> Part:
    name = "chats"
    try:
        mine, theirs = (load_chat_template(each) for each in (source, folder))
    except ValueError as error:
        return Part(name, "", (Remark(DIFFERS, "template", "folder", str(error)),))
    if mine is None and theirs is None:
        return Part(name, "no template on either side")
    if mine is None:
        absent = Remark(NOT_COMPUTED, "template", "source", "it has none, and the folder has one")
        return Part(name, "", (absent,))
    if theirs is None:
        return Part(name, "", (Remark(DIFFERS, "missing", "folder", "no chat template"),))
    findings = (*_chats(mine, theirs), *_others(source, folder, mine.source, theirs.source))
    up_to = ("another wording of the chat template",) if mine.source != theirs.source else ()
    return Part(name, f"{len(_CHATS)} conversations", findings, up_to)


def _chats(mine: ChatTemplate, theirs: ChatTemplate) -> Iterator[Remark]:
    for name, (messages, values) in _CHATS.items():
        for answers in (True, False):
            one, other = (_rendered(each, messages, values, answers) for each in (mine, theirs))
            if one != other:
                ends = "" if answers else ", without the beginning of an answer"
                yield Remark(
                    DIFFERS, "chat", name + ends, f"{other!r:.300}, and {one!r:.300} in the source"
                )


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    answers: bool,
) -> str:
    """Return what a template renders, or that it refuses; each side may refuse alike."""
    try:
        tools = values.get("tools", ())
        return template.render(messages, values=values, tools=tools, answers=answers)
    except RejectedError:
        return "refused"
