"""Compare tokenizers by the ids of probe texts, and chat templates by what they render."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from export_scripts.checkpoints.base import Region, json_file, read_small
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.ft.tokenizer_files import SETTINGS_FILE, TEMPLATES_FOLDER
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

_WHOLE = "tokenizer.json"  # holds vocabulary and merges, and is taken before the other files
_VOCABULARIES = (_WHOLE, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_SPECIAL = ("special_tokens_map.json", "added_tokens.json")
# Conversations by name: their messages, and the values of the template's variables.
_CHATS = json_file(Path(__file__).with_name("chats.json"))
_MOST_SHOWN = 12
_MOST_ADDED = 64  # tokens that probe texts are made of
# Compared by themselves, or written by each release of transformers in its own way.
_NOT_COMPARED = (
    "version", "added_tokens_decoder", "auto_map", "backend", "chat_template", "is_local",
    "name_or_path", "processor_class", "special_tokens_map_file", "tokenizer_class",
    "tokenizer_file", "transformers_version", "local_files_only",
)  # fmt: skip
_TOKENIZER, _CHATS_PART = "tokenizer", "chats"


class _Encoder(NamedTuple):
    """A loaded tokenizer.

    `encode` gives the ids of a text, without and with the markers that the tokenizer adds, `decode`
    the text of ids, without and with the special tokens; `tokens` is the count of ids, from 0 to
    the largest. Token -> id and roles of special tokens are there where the library has them.
    """

    library: str
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[list[int], bool], str]
    tokens: int
    vocabulary: Mapping[str, int] = {}
    special: Mapping[str, Any] = {}

    def read(self, text: str, *, both: bool) -> dict[str, Any]:
        """Return what the tokenizer makes of a text; `both`: with the markers, too."""
        found: dict[str, Any] = {}
        for special in (False, True)[: 1 + both]:
            ids = self.encode(text, special)
            words = " with markers" * special
            found |= {f"ids{words}": ids, f"text of ids{words}": self.decode(ids, special)}
        return found


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


def _load_alone(folder: Path) -> _Encoder:
    """Load tokenizer.json as it is; what libraries add to it is left out."""
    own = tokenizers.Tokenizer.from_file(str(folder / _WHOLE))
    return _Encoder(
        f"tokenizers {tokenizers.__version__}",
        lambda text, special: own.encode(text, add_special_tokens=special).ids,
        lambda ids, special: own.decode(ids, skip_special_tokens=not special),
        own.get_vocab_size(),
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
        return not_computed(_TOKENIZER, str(error).replace(str(source), "it"), "source"), None
    try:
        theirs = _load(folder)
    except ValueError as error:
        reason = str(error).replace(str(folder), "it")  # a copy
        lost = Remark(DIFFERS, "missing", "folder", reason)
        return Part(_TOKENIZER, "", (lost,)), mine.tokens
    probes = (*PROBES, *_around_added_tokens(source))
    findings = [*_differences(mine, theirs, probes)]
    if not findings and all((each / _WHOLE).is_file() for each in (source, folder)):
        # transformers passes over some of its settings, such as the length at which texts are cut.
        findings += _differences(_load_alone(source), _load_alone(folder), probes)
    findings += _wordings(source, folder)
    up_to = [each.where for each in findings if each.status == UP_TO]
    return Part(
        _TOKENIZER,
        f"{len(probes)} probe texts, {mine.library} and {theirs.library}",
        tuple(findings),
        (f"another wording of the tokenizer ({', '.join(up_to)})",) if up_to else (),
    ), mine.tokens


def _around_added_tokens(source: Path) -> Iterator[str]:
    """Yield texts with the tokens that a tokenizer finds before it splits a text."""
    for each in _json(source / "tokenizer.json").get("added_tokens", ())[:_MOST_ADDED]:
        yield f"a {each['content']} b{each['content']}c"
        yield f"{each['content']}".upper()


def _differences(mine: _Encoder, theirs: _Encoder, probes: Sequence[str]) -> Iterator[Remark]:
    # Files alone do not say what markers there are.
    both = bool(mine.vocabulary and theirs.vocabulary)
    found = []
    for text in probes:
        sides = (each.read(text, both=both) for each in (mine, theirs))
        for kind, one, other in itertools.islice(differing(*sides), 1):
            found.append(differs(kind, f"{text!r:.60}", one, other))
    yield from found[:_MOST_SHOWN]
    if more := len(found[_MOST_SHOWN:]):
        yield Remark(DIFFERS, "ids", f"{more} more texts", "other ids")
    if not both:
        return
    for role, one, other in differing(mine.special, theirs.special):
        yield differs("special token", role, one, other)
    if words := sorted({token for token, _ in mine.vocabulary.items() ^ theirs.vocabulary.items()}):
        shown = ", ".join(f"{word!r:.30}" for word in words[:_MOST_SHOWN])
        detail = f"{len(words)} tokens have other ids, or are on one side alone: {shown}"
        yield Remark(DIFFERS, "vocabulary", "folder", detail)


def _json(file: Path) -> dict[str, Any]:
    return json_file(file) if file.is_file() else {}


def _table(file: Path) -> dict[str, Any]:
    """Return the settings in a file of a tokenizer, its merges as texts, without its vocabulary."""
    table = _json(file)
    if isinstance(model := table.get("model"), dict):
        merges = model.get("merges") or ()
        texts = [each if isinstance(each, str) else " ".join(each) for each in merges]
        table["model"] = {**model, "vocab": None, "merges": texts}
    return {name: each for name, each in table.items() if name not in _NOT_COMPARED}


def _content(file: Path) -> Any:
    """Return what a file says, whatever its spaces, and the version that heads merges."""
    content = file.read_bytes()
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            return json.loads(content)
    if file.suffix == ".txt":
        return [each for each in content.splitlines() if each and not each.startswith(b"#version")]
    return content


def _wordings(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield other merges, which few texts may show, and what may change neither ids nor texts."""
    have_whole = all((each / _WHOLE).is_file() for each in (source, folder))
    for file in (*_VOCABULARIES[1:], *_SPECIAL) if have_whole else ():
        own, found = source / file, folder / file
        is_own = own.is_file()
        if found.is_file() and not (is_own and _content(own) == _content(found)):
            status = NOT_COMPUTED if is_own and file in _VOCABULARIES else UP_TO
            yield Remark(status, "another file", file, f"some libraries read it, not {_WHOLE}")
    for file in (_WHOLE, SETTINGS_FILE):
        if not all((each / file).is_file() for each in (source, folder)):
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
        mine, theirs = map(load_chat_template, (source, folder))
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


def _named_templates(folder: Path) -> dict[str, str]:
    """Return the templates next to the one that is taken, by name: libraries choose among them."""
    own = _json(folder / SETTINGS_FILE).get("chat_template") or []
    found = {}
    for each in own if isinstance(own, list) else [{"name": "default", "template": own}]:
        table = each if isinstance(each, dict) else {"name": each}
        found[str(table.get("name"))] = str(table.get("template"))
    for path in (folder / TEMPLATES_FOLDER).glob("*.jinja"):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _chats(mine: ChatTemplate, theirs: ChatTemplate) -> Iterator[Remark]:
    for name, chat in _CHATS.items():
        for answers in (True, False):
            one, other = (_rendered(each, answers=answers, **chat) for each in (mine, theirs))
            if one != other:
                where = name if answers else f"{name}, without the beginning of an answer"
                yield differs("chat", where, one, other)


def _rendered(
    template: ChatTemplate,
    *,
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
