"""Compare tokenizers by the ids of probe texts, and chat templates by what they render."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import Region, json_table, read_small
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.ft.tokenizer_files import SETTINGS_FILE
from inference.backend.tokenizer import load_tokenizer
from inference.certify.activations import NoLibraryError
from inference.certify.findings import DIFFERS, UP_TO, Part, Remark, differing, not_computed
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
# Compared by themselves, or written by each release of transformers in its own way.
_NOT_COMPARED = (
    "version", "added_tokens_decoder", "auto_map", "backend", "chat_template", "is_local",
    "name_or_path", "processor_class", "special_tokens_map_file", "tokenizer_class",
    "tokenizer_file", "transformers_version", "local_files_only",
)  # fmt: skip
_TOKENIZER, _CHATS_PART = "tokenizer", "chats"


@dataclass(frozen=True)
class _Encoder:
    """A loaded tokenizer.

    Attributes:
        encode: ids of a text, without and with the markers that the tokenizer adds.
        decode: text of ids, without and with the special tokens.
        tokens: the count of its ids, from 0 to the largest.
        vocabulary: token -> id, where the library has it.
        special: roles of special tokens, such as eos_token -> the token.
    """

    library: str
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[list[int], bool], str]
    tokens: int
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    special: Mapping[str, Any] = field(default_factory=dict)


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
        lambda ids, _: found.decode(ids),
        found.vocab_size,
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
        lambda ids, special: own.decode(ids, skip_special_tokens=not special),
        max(known.values(), default=-1) + 1,
        known,
        own.special_tokens_map,
    )


def compare_texts(pair: Pair) -> tuple[list[Part], int | None]:
    """Compare the tokenizers and the chat templates of both sides.

    The second value is how many ids the source's tokenizer has; None where it has none.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = (Path(scratch, "source"), Path(scratch, "folder"))
        for folder, facts in zip(sides, (pair.facts, pair.folder.facts), strict=True):
            _write(facts.tokenizer, facts.config, folder)
        tokenizers, tokens = _tokenizers(*sides)
        return [tokenizers, _templates(*sides)], tokens


def _write(files: Mapping[str, Region], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(read_small(file))
    if kind := config.get("model_type"):  # by which transformers chooses a class
        (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")


def _tokenizers(source: Path, folder: Path) -> tuple[Part, int | None]:
    has = [any((each / name).is_file() for name in _VOCABULARIES) for each in (source, folder)]
    if not any(has):
        return Part(_TOKENIZER, "no tokenizer on either side"), None
    if not has[0]:
        return not_computed(_TOKENIZER, "it has none to compare with", "source"), None
    try:
        mine = _load(source)
    except ValueError as error:
        return not_computed(_TOKENIZER, str(error), "source"), None
    try:
        if not has[1]:
            raise ValueError("no tokenizer")
        theirs = _load(folder)
    except ValueError as error:
        lost = Remark(DIFFERS, "missing", "folder", str(error))
        return Part(_TOKENIZER, "", (lost,)), mine.tokens
    probes = (*PROBES, *_around_added_tokens(source))
    wordings = list(_wordings(source, folder))
    up_to = [each.where for each in wordings if each.status == UP_TO]
    return Part(
        _TOKENIZER,
        f"{len(probes)} probe texts, {mine.library} and {theirs.library}",
        (*_differences(mine, theirs, probes), *wordings),
        (f"another wording of the tokenizer ({', '.join(up_to)})",) if up_to else (),
    ), mine.tokens


def _around_added_tokens(source: Path) -> Iterator[str]:
    """Yield texts with the tokens that a tokenizer finds before it splits a text."""
    for each in _json(source / "tokenizer.json").get("added_tokens", ())[:_MOST_ADDED]:
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
            elif mine.decode(ids, special) != theirs.decode(ids, special):
                shown = f"{theirs.decode(ids, special)!r:.60}, and otherwise in the source"
                found.append(Remark(DIFFERS, "text of ids", f"{text!r:.60}", shown))
    yield from found[:_MOST_SHOWN]
    if more := len(found[_MOST_SHOWN:]):
        yield Remark(DIFFERS, "ids", f"{more} more texts", "other ids")
    if not both:
        return
    for role, one, other in differing(mine.special, theirs.special):
        yield Remark(DIFFERS, "special token", role, f"{other!r}, and {one!r} in the source")
    if words := sorted({token for token, _ in mine.vocabulary.items() ^ theirs.vocabulary.items()}):
        shown = ", ".join(f"{word!r:.30}" for word in words[:_MOST_SHOWN])
        detail = f"{len(words)} tokens have other ids, or are on one side alone: {shown}"
        yield Remark(DIFFERS, "vocabulary", "folder", detail)


def _json(file: Path) -> dict[str, Any]:
    return json_table(file.read_bytes(), file) if file.is_file() else {}


def _table(file: Path) -> dict[str, Any]:
    """Return the settings in a file of a tokenizer, its merges as texts, without its vocabulary."""
    table = _json(file)
    if isinstance(model := table.get("model"), dict):
        merges = model.get("merges") or ()
        texts = [each if isinstance(each, str) else " ".join(each) for each in merges]
        table["model"] = {**model, "vocab": None, "merges": texts}
    return {name: each for name, each in table.items() if name not in _NOT_COMPARED}


def _wordings(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield other merges, which few texts may show, and what may change neither ids nor texts."""
    for file in ("tokenizer.json", SETTINGS_FILE):
        if not all((each / file).is_file() for each in (source, folder)):
            continue
        for name, one, other in differing(_table(source / file), _table(folder / file)):
            if name == "model.merges":
                count = len(set(one) ^ set(other))
                detail = f"{count} are on one side alone" if count else "they are in another order"
                yield Remark(DIFFERS, "merges", file, detail)
            else:
                detail = f"{other!r:.100}, and {one!r:.100} in the source"
                yield Remark(UP_TO, "another wording", f"{file}, {name}", detail)


def _named_templates(folder: Path) -> dict[str, str]:
    """Return the templates next to the one that is taken, by name: libraries choose among them."""
    own = _json(folder / SETTINGS_FILE).get("chat_template") or ()
    if isinstance(own, str):
        own = [{"name": "default", "template": own}]
    found = {str(each.get("name")): str(each.get("template")) for each in own}
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _templates(source: Path, folder: Path) -> Part:
    try:
        mine, theirs = (load_chat_template(each) for each in (source, folder))
        if mine is not None and theirs is None:
            raise ValueError("no chat template")
    except ValueError as error:
        return Part(_CHATS_PART, "", (Remark(DIFFERS, "template", "folder", str(error)),))
    if theirs is None:
        return Part(_CHATS_PART, "no template on either side")
    if mine is None:
        return not_computed(_CHATS_PART, "it has no template, and the folder has one", "source")
    findings, taken = [*_chats(mine, theirs)], (mine.source, theirs.source)
    own, found = map(_named_templates, (source, folder))
    for name in dict.fromkeys((*own, *found)):
        pair = (own.get(name, mine.source), found.get(name, theirs.source))
        if pair[0] != pair[1] and pair != taken:
            detail = "some libraries take it, and it is not the source's"
            findings.append(Remark(DIFFERS, "template", f"template {name}", detail))
    up_to = () if mine.source == theirs.source else ("another wording of the chat template",)
    return Part(_CHATS_PART, f"{len(_CHATS)} conversations", tuple(findings), up_to)


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
