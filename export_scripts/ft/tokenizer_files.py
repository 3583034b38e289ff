"""Tokenizer files: the known kinds, and the one that a folder holds."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from export_scripts.families.layout.generation import GENERATION_FILE
from foundations.files.json_content import Fields, json_object
from foundations.suggest import matches_any


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk. `kind` is a key of `TOKENIZER_KINDS`.

    `settings` states the tokens added to a text, `template` turns the messages of a chat into a
    text, `generation` has defaults of requests; each is None if the checkpoint lacks the file.
    """

    kind: str
    files: tuple[Path, ...]
    settings: Path | None = None
    template: Path | None = None
    generation: Path | None = None

    @property
    def all_files(self) -> tuple[Path, ...]:
        """All files, including the optional ones."""
        others = (self.settings, self.template, self.generation)
        return (*self.files, *(each for each in others if each is not None))


SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"  # before transformers 4.52, a key of the settings
TEMPLATES_FOLDER = "additional_chat_templates"  # further templates, NAME.jinja
# kind -> required files; in order of preference if a folder has several kinds.
TOKENIZER_KINDS = {
    "hf": ("tokenizer.json",),
    "bpe": ("vocab.json", "merges.txt"),
    "sentencepiece": ("*.model",),
    "wordpiece": ("vocab.txt",),
}
TOKENIZER_CHOICES = "tokenizer.json, vocab.json with merges.txt, tokenizer.model or vocab.txt"


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Raise ValueError for each error of the block, which a tokenizer's files caused.

    Libraries raise any kind, and a panic of the tokenizers library is not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        is_missing = isinstance(error, KeyError)
        raise ValueError(f"there is no token {error}" if is_missing else str(error)) from error


def tokenizer_settings(path: Path) -> Fields:
    """Return the content of a SETTINGS_FILE. Raises OSError, or ValueError if it is damaged."""
    return json_object(path.read_bytes(), path.name)


def makes_tokenizer(names: Iterable[str]) -> bool:
    """Return whether files with these names make up a tokenizer of any kind."""
    found = list(names)
    return any(
        all(fnmatch.filter(found, pattern) for pattern in patterns)
        for patterns in TOKENIZER_KINDS.values()
    )


def is_replaced(name: str, given: Sequence[str]) -> bool:
    """Return whether the tokenizer files that the user named replace a checkpoint's file.

    They replace files of the same name and of other kinds, which could be preferred to them.
    Settings are kept, and so are merges if only a vocabulary is given.
    """
    kinds = [patterns for patterns in TOKENIZER_KINDS.values() if matches_any(name, patterns)]
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
