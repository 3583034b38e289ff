"""Tokenizer files: the kinds known, and the one a folder holds."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from export_scripts.families.layout.generation import GENERATION_FILE
from foundations.files.json_content import Fields, json_object


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk. `kind` is a key of `TOKENIZER_KINDS`.

    `settings` names the markers added to a text, `template` is how messages of a chat become one,
    `generation` has defaults of requests; each if the checkpoint has that file.
    """

    kind: str
    files: tuple[Path, ...]
    settings: Path | None = None
    template: Path | None = None
    generation: Path | None = None

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The files, with those that there need not be."""
        others = (self.settings, self.template, self.generation)
        return (*self.files, *(each for each in others if each is not None))


SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"  # of transformers from 4.52 on; before, a key of the settings
TEMPLATES_FOLDER = "additional_chat_templates"  # of further ones, each a NAME.jinja
# kind -> file names, all needed; in order of preference where a folder fits several.
TOKENIZER_KINDS = {
    "hf": ("tokenizer.json",),
    "bpe": ("vocab.json", "merges.txt"),
    "sentencepiece": ("*.model",),
    "wordpiece": ("vocab.txt",),
}
TOKENIZER_CHOICES = "tokenizer.json, vocab.json with merges.txt, tokenizer.model or vocab.txt"


def tokenizer_settings(path: Path) -> Fields:
    """Return the content of a SETTINGS_FILE. Raises OSError, or ValueError if it is damaged."""
    return json_object(path.read_bytes(), path.name)


def makes_tokenizer(names: Iterable[str]) -> bool:
    """Return whether files of these names are enough for a tokenizer of some kind."""
    found = list(names)
    return any(
        all(fnmatch.filter(found, pattern) for pattern in patterns)
        for patterns in TOKENIZER_KINDS.values()
    )


def is_replaced(name: str, given: Sequence[str]) -> bool:
    """Return whether a checkpoint's file gives way to the tokenizer files that a user names.

    The same file does, and one of another kind, which could be taken in their place. Settings stay,
    and merges next to a given vocabulary.
    """
    kinds = [
        patterns
        for patterns in TOKENIZER_KINDS.values()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    is_same_kind = any(fnmatch.filter(given, pattern) for kind in kinds for pattern in kind)
    return bool(given) and bool(kinds) and (name in given or not is_same_kind)


def find_tokenizer(folder: Path, *, kind: str | None = None) -> TokenizerFiles | None:
    """Return the tokenizer in `folder` (of `kind`, if given), or None.

    Raises:
        ValueError: `kind` is unknown, or several files could be the one that is needed.
    """
    if kind is not None and kind not in TOKENIZER_KINDS:
        known = ", ".join(TOKENIZER_KINDS)
        raise ValueError(f"tokenizer_type={kind!r} is unknown; known types: {known}.")
    for each in [kind] if kind else TOKENIZER_KINDS:
        found = [sorted(folder.glob(pattern)) for pattern in TOKENIZER_KINDS[each]]
        if not all(found):
            continue
        if several := [files for files in found if len(files) > 1]:
            names = ", ".join(path.name for path in several[0])
            raise ValueError(f"{folder} holds several tokenizer models: {names}; keep one.")
        others = [folder / name for name in (SETTINGS_FILE, TEMPLATE_FILE, GENERATION_FILE)]
        return TokenizerFiles(
            each,
            tuple(files[0] for files in found),
            *(path if path.is_file() else None for path in others),
        )
    return None
