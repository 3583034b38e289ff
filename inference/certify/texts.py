"""Compare tokenizers on probe texts, and chat templates on conversations."""

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from export_scripts.checkpoints.base import Region, json_file, read_small
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.ft.tokenizer_files import SETTINGS_FILE, TEMPLATES_FOLDER, tokenizer_errors
from inference.backend.tokenizer import load_tokenizer
from inference.certify.findings import (
    DIFFERS,
    NOT_COMPUTED,
    UP_TO,
    Part,
    Remark,
    differing,
    differs,
    not_computed,
)
from inference.certify.huggingface import NoLibraryError, import_transformers
from inference.certify.pair import Pair
from inference.front.guard import RejectedError
from inference.front.openai.codec import ChatTemplate, load_chat_template

_WHOLE = "tokenizer.json"  # holds vocabulary and merges, and has precedence over the other files
_VOCABULARIES = (_WHOLE, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_SPECIAL = ("special_tokens_map.json", "added_tokens.json")
# Name of a conversation -> its messages and the values of the template's variables.
_CHATS = json_file(Path(__file__).with_name("chats.json"))
_MAX_SHOWN = 12
_MAX_ADDED = 64  # added tokens for which probe texts are made
_PAIR = ("Is it the same?", "It is.")
# Keys that other code compares, or that depend on the release of transformers.
_NOT_COMPARED = (
    "version", "added_tokens_decoder", "auto_map", "backend", "chat_template", "is_local",
    "name_or_path", "processor_class", "special_tokens_map_file", "tokenizer_file",
    "transformers_version", "local_files_only",
)  # fmt: skip
# What names of classes do not say: which library has it, and that tokenizer.json is taken as it is.
_AS_IT_IS = re.compile("PreTrainedTokenizer|TokenizersBackend|None|Fast$")
_TOKENIZER, _CHATS_PART = "tokenizer", "chats"


class _Encoder(NamedTuple):
    """A loaded tokenizer.

    `vocabulary` (token -> id), `special` (role -> token) and `pair` (what two texts become) are
    empty if the library has none.
    """

    library: str
    encode: Callable[[str, bool], list[int]]  # text, whether to add special tokens
    decode: Callable[[list[int], bool], str]  # ids, whether to keep special tokens
    tokens: int  # largest id + 1
    vocabulary: Mapping[str, int] = {}
    special: Mapping[str, Any] = {}
    pair: Mapping[str, Any] = {}

    def read(self, text: str, *, both: bool) -> dict[str, Any]:
        """Return a text's ids and their text; with `both`, also those with special tokens.

        The library's error takes the place of the ids.
        """
        found: dict[str, Any] = {}
        for special in (False, True)[: 1 + both]:
            suffix = " with markers" * special
            try:
                with tokenizer_errors():
                    found[f"ids{suffix}"] = ids = self.encode(text, special)
                    found[f"text of ids{suffix}"] = self.decode(ids, special)
            except ValueError as error:
                found[f"ids{suffix}"] = str(error)
        return found


def _load(folder: Path) -> _Encoder:
    """Load a folder's tokenizer, by transformers if it has tokenizer_config.json.

    Raises:
        ValueError: it cannot be loaded.
    """
    if (folder / SETTINGS_FILE).is_file():
        with contextlib.suppress(NoLibraryError):
            return _load_by_transformers(folder)
    tokenizer = load_tokenizer(folder)
    return _Encoder(
        "Slipway",
        lambda text, special: list(tokenizer.encode(text, special=special)),
        lambda ids, _: tokenizer.decode(ids),
        tokenizer.vocab_size,
    )


def _load_whole(folder: Path) -> _Encoder:
    """Load tokenizer.json alone, without what transformers changes."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / _WHOLE))
    return _Encoder(
        f"tokenizers {tokenizers.__version__}",
        lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids,
        lambda ids, special: tokenizer.decode(ids, skip_special_tokens=not special),
        tokenizer.get_vocab_size(),
    )


def _load_by_transformers(folder: Path) -> _Encoder:
    transformers = import_transformers()
    try:
        with tokenizer_errors():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            vocabulary = tokenizer.get_vocab()
            pair = tokenizer(*_PAIR, return_token_type_ids=True)
    except ValueError as error:
        raise ValueError(f"transformers cannot load the tokenizer: {error}") from error
    return _Encoder(
        f"transformers {transformers.__version__}",
        lambda text, special: list(tokenizer.encode(text, add_special_tokens=special)),
        lambda ids, special: tokenizer.decode(ids, skip_special_tokens=not special),
        max(vocabulary.values(), default=-1) + 1,
        vocabulary,
        tokenizer.special_tokens_map,
        dict(pair),
    )


def compare_texts(pair: Pair) -> tuple[list[Part], int | None]:
    """Compare the tokenizers and the chat templates of both sides.

    The second value is the number of ids of the source's tokenizer; None without one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = (Path(scratch, "source"), Path(scratch, "folder"))
        for folder, facts in zip(sides, (pair.facts, pair.folder.facts), strict=True):
            _write(facts.tokenizer, facts.config, folder)
        tokenizer_part, tokens = _tokenizers(*sides)
        return [tokenizer_part, _templates(*sides)], tokens


def _write(files: Mapping[str, Region], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(read_small(file))
    if kind := config.get("model_type"):  # transformers chooses the class of a tokenizer by it
        (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")


def _tokenizers(source: Path, folder: Path) -> tuple[Part, int | None]:
    has_vocabulary = [
        any((side / name).is_file() for name in _VOCABULARIES) for side in (source, folder)
    ]
    if not any(has_vocabulary):
        return Part(_TOKENIZER, "no tokenizer on either side"), None
    if not has_vocabulary[0]:
        return not_computed(_TOKENIZER, "the source has no tokenizer", "source"), None
    try:
        expected = _load(source)
    except ValueError as error:
        return not_computed(_TOKENIZER, str(error).replace(str(source), "it"), "source"), None
    try:
        found = _load(folder)
    except ValueError as error:
        reason = str(error).replace(str(folder), "it")  # the path is that of a temporary copy
        remark = Remark(DIFFERS, "missing", "folder", reason)
        return Part(_TOKENIZER, "", (remark,)), expected.tokens
    probes = (*PROBES, *_added_token_probes(source))
    findings = [*_differences(expected, found, probes)]
    if not findings and all((side / _WHOLE).is_file() for side in (source, folder)):
        # transformers ignores some settings of tokenizer.json, such as truncation.
        findings += _differences(_load_whole(source), _load_whole(folder), probes)
    findings += _other_tokens(source, folder, found.vocabulary)
    findings += _file_differences(source, folder)
    up_to = [remark.where for remark in findings if remark.status == UP_TO]
    return Part(
        _TOKENIZER,
        f"{len(probes)} probe texts, {expected.library} and {found.library}",
        tuple(findings),
        (f"another wording of the tokenizer ({', '.join(up_to)})",) if up_to else (),
    ), expected.tokens


def _added_token_probes(source: Path) -> Iterator[str]:
    """Yield texts with the added tokens, which a tokenizer finds before it splits a text."""
    for token in _json(source / _WHOLE).get("added_tokens", ())[:_MAX_ADDED]:
        yield f"a {token['content']} b{token['content']}c"
        yield f"{token['content']}".upper()


def _differences(expected: _Encoder, found: _Encoder, probes: Sequence[str]) -> Iterator[Remark]:
    # Without a library's vocabulary, special tokens are not known.
    both = bool(expected.vocabulary and found.vocabulary)
    remarks = []
    for text in probes:
        sides = (side.read(text, both=both) for side in (expected, found))
        for kind, one, other in itertools.islice(differing(*sides), 1):
            remarks.append(differs(kind, f"{text!r:.60}", one, other))
    yield from remarks[:_MAX_SHOWN]
    if more := len(remarks[_MAX_SHOWN:]):
        yield Remark(DIFFERS, "ids", f"{more} more texts", "other ids")
    if not both:
        return
    for role, one, other in differing(expected.special, found.special):
        yield differs("special token", role, one, other)
    for name, one, other in differing(expected.pair, found.pair):
        yield differs("a pair of texts", name, one, other)
    entries = expected.vocabulary.items() ^ found.vocabulary.items()
    if tokens := sorted({token for token, _ in entries}):
        shown = ", ".join(f"{token!r:.30}" for token in tokens[:_MAX_SHOWN])
        detail = f"{len(tokens)} tokens have other ids, or are on one side alone: {shown}"
        yield Remark(DIFFERS, "vocabulary", "folder", detail)


def _json(file: Path) -> dict[str, Any]:
    return json_file(file) if file.is_file() else {}


def _added_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what files next to the vocabulary state of added tokens, which some libraries take."""
    tokens = _json(folder / SETTINGS_FILE).get("added_tokens_decoder", {})
    found = {each.get("content"): {**each, "id": int(number)} for number, each in tokens.items()}
    for token, number in _json(folder / _SPECIAL[1]).items():
        found[token] = {**found.get(token, {}), "id": number}
    return found


def _other_tokens(source: Path, folder: Path, vocabulary: Mapping[str, int]) -> Iterator[Remark]:
    """Yield added tokens that the vocabulary states differently, unless the source has them so."""
    known = {name: {"id": number} for name, number in vocabulary.items()}
    known |= {each["content"]: each for each in _json(folder / _WHOLE).get("added_tokens", ())}
    original = _added_tokens(source)
    for name, token in _added_tokens(folder).items():
        other = {**token, **known.get(name, {})}
        for key, value in token.items() if token != original.get(name) else ():
            if value != other[key]:
                yield differs("added token", f"{name}, {key}", other[key], value)


def _table(file: Path) -> dict[str, Any]:
    """Return the settings in a tokenizer's file, with merges as texts, without the vocabulary."""
    table = _json(file)
    table["tokenizer_class"] = _AS_IT_IS.sub("", str(table.get("tokenizer_class")))
    if isinstance(model := table.get("model"), dict):
        merges = model.get("merges") or ()
        texts = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        table["model"] = {**model, "vocab": None, "merges": texts}
    return {name: value for name, value in table.items() if name not in _NOT_COMPARED}


def _content(file: Path) -> Any:
    """Return a file's content without its formatting: JSON values, or lines without #version."""
    content = file.read_bytes()
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            return json.loads(content)
    if file.suffix == ".txt":
        return [line for line in content.splitlines() if line and not line.startswith(b"#version")]
    return content


def _file_differences(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield differences of the files that probe texts need not show, such as rare merges."""
    have_whole = all((side / _WHOLE).is_file() for side in (source, folder))
    for file in (*_VOCABULARIES[1:], *_SPECIAL) if have_whole else ():
        original, found = source / file, folder / file
        has_original = original.is_file()
        if found.is_file() and not (has_original and _content(original) == _content(found)):
            status = NOT_COMPUTED if has_original and file in _VOCABULARIES else UP_TO
            yield Remark(status, "another file", file, f"some libraries read it, not {_WHOLE}")
    for file in (_WHOLE, SETTINGS_FILE):
        if not all((side / file).is_file() for side in (source, folder)):
            continue
        for name, one, other in differing(_table(source / file), _table(folder / file)):
            if name == "model.merges":
                count = len(set(one) ^ set(other))
                detail = f"{count} are on one side alone" if count else "they are in another order"
                yield Remark(DIFFERS, "merges", file, detail)
            else:
                yield differs("another wording", f"{file}, {name}", one, other, UP_TO)


def _templates(source: Path, folder: Path) -> Part:
    try:
        expected, loaded = map(load_chat_template, (source, folder))
        if expected is not None and loaded is None:
            raise ValueError("no chat template")
    except ValueError as error:
        return Part(_CHATS_PART, "", (Remark(DIFFERS, "template", "folder", str(error)),))
    if loaded is None:
        return Part(_CHATS_PART, "no template on either side")
    if expected is None:
        return not_computed(_CHATS_PART, "it has no template, and the folder has one", "source")
    findings, compared = [*_chats(expected, loaded)], (expected.source, loaded.source)
    originals, found = map(_named_templates, (source, folder))
    for name in dict.fromkeys((*originals, *found)):
        pair = (originals.get(name, expected.source), found.get(name, loaded.source))
        if pair[0] != pair[1] and pair != compared:
            detail = "some libraries load it, and it is not the source's"
            findings.append(Remark(DIFFERS, "template", f"template {name}", detail))
    up_to = () if expected.source == loaded.source else ("another wording of the chat template",)
    return Part(_CHATS_PART, f"{len(_CHATS)} conversations", tuple(findings), up_to)


def _named_templates(folder: Path) -> dict[str, str]:
    """Return all chat templates of a folder by name: libraries differ in which one they load."""
    stated = _json(folder / SETTINGS_FILE).get("chat_template") or []
    found = {}
    for each in stated if isinstance(stated, list) else [{"name": "default", "template": stated}]:
        table = each if isinstance(each, dict) else {"name": each}
        found[str(table.get("name"))] = str(table.get("template"))
    for path in (folder / TEMPLATES_FOLDER).glob("*.jinja"):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _chats(source: ChatTemplate, folder: ChatTemplate) -> Iterator[Remark]:
    for name, chat in _CHATS.items():
        for answers in (True, False):
            one, other = (_rendered(side, chat, answers=answers) for side in (source, folder))
            if one != other:
                where = name if answers else f"{name}, without the beginning of an answer"
                yield differs("chat", where, one, other)


def _rendered(template: ChatTemplate, chat: Mapping[str, Any], *, answers: bool) -> str:
    """Return the rendered chat; "refused" if the template refuses it, as both sides may."""
    values = chat["values"]
    try:
        tools = values.get("tools", ())
        return template.render(chat["messages"], values=values, tools=tools, answers=answers)
    except RejectedError:
        return "refused"
