"""Texts and tokens of a served model: what its tokenizer and its chat template say."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.backend.tokenizer import REPLACEMENT, Tokenizer, load_tokenizer
from inference.front.guard import RejectedError
from inference.front.openai.chat_template import ChatTemplate, load_chat_template

# So many tokens before others are enough to decode these as within a text: a character has at most
# four bytes, each perhaps a token, and SentencePiece looks at the token before.
_WINDOW = 8
_MOST_PENDING = 16  # tokens that are held back for a character that does not end


class Codec:
    """Encodes prompts and decodes answers.

    Attributes:
        end_ids: tokens that end an answer and are not part of its text.
        chat_end_id: one more in a chat, if the tokenizer's settings name another end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        end_ids: Sequence[int] = (),
        suffix: Sequence[int] = (),
    ) -> None:
        """Take what a served model was exported with; `suffix` has tokens after every prompt."""
        self._tokenizer = tokenizer
        self._template = template
        self._suffix = tuple(suffix)
        self.end_ids = frozenset(end_ids)
        self.chat_end_id = self._chat_end_id()

    def _chat_end_id(self) -> int | None:
        if self._template is None or not self._template.end_token:
            return None
        ids = self._tokenizer.encode(self._template.end_token)
        return ids[0] if len(ids) == 1 and ids[0] not in self.end_ids else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the markers that the model expects around it."""
        return (*self._tokenizer.encode(text, special=True), *self._suffix)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation, which the template may refuse, or none is there."""
        if self._template is None:
            raise RejectedError(
                "the tokenizer of this model has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        # A template writes every marker itself.
        return tuple(self._tokenizer.encode(self._template.render(messages)))

    def description(self) -> dict[str, str | None]:
        """Return the tokens that mark the end and the beginning of a text, and the template."""
        end, prefix = sorted(self.end_ids)[:1], self._tokenizer.prefix_ids
        return {
            "eos_token": self._tokenizer.decode(end) if end else None,
            "bos_token": self._tokenizer.decode(prefix[:1]) if prefix else None,
            "chat_template": None if self._template is None else self._template.source,
        }

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text; that of the end token, spelled, is the end token."""
        end = sorted(self.end_ids)[:1]
        if end and text == self._tokenizer.decode(end):
            return end
        return list(self.encode(text)) if special else self._tokenizer.encode(text)

    def single_token(self, word: str) -> list[int]:
        """Return the tokens that are a word by themselves."""
        return [ids[0] for ids in self._tokenizer.word_forms(word) if len(ids) == 1]

    def text_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to that of `before`."""
        special = self._tokenizer.special_ids
        shown = [index for index in ids if index not in special and index not in self.end_ids]
        window = [index for index in before[-_WINDOW:] if index not in special]
        start = self._tokenizer.decode(window)
        whole = self._tokenizer.decode([*window, *shown])
        if whole.startswith(start):
            return whole[len(start) :]
        return self._tokenizer.decode(shown)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt that was given as tokens."""
        return self._tokenizer.decode(ids)

    def piece(self, before: Sequence[int], token: int) -> str:
        """Return what a token adds to a text; markers as they are spelled.

        A token that leaves a character incomplete adds nothing, the one that completes it all.
        """
        window = list(before[-_WINDOW:])
        start = self._tokenizer.decode(window, partial=True)
        whole = self._tokenizer.decode([*window, token], partial=True)
        return whole[len(start) :] if whole.startswith(start) else self._tokenizer.decode([token])

    def name(self, before: Sequence[int], token: int) -> str:
        """Return what an alternative token would add, by itself where that is nothing."""
        return self.piece(before, token) or self._tokenizer.decode([token])


@dataclass(frozen=True)
class CodecFiles:
    """The files of a codec; each process that needs it reads them once."""

    folder: Path
    kind: str | None = None  # of the tokenizer; None finds it out
    end_ids: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    changed_ns: int = 0  # the last change of a file; later files make another codec

    def codec(self) -> Codec:
        """Return the codec. Raises ValueError if a file cannot be read."""
        return _codec(self)


@functools.lru_cache(maxsize=2)  # that of a server that ends, and of its successor
def _codec(files: CodecFiles) -> Codec:
    tokenizer = load_tokenizer(files.folder, kind=files.kind)
    template = load_chat_template(files.folder)
    return Codec(tokenizer, template, end_ids=files.end_ids, suffix=files.suffix)


class TextStream:
    """The text of tokens that come a few at a time; each is decoded once, within a window.

    The prompt's tokens, which are `before`, decide about the first space.
    """

    def __init__(self, codec: Codec, before: Sequence[int]) -> None:
        self._codec = codec
        self._window = list(before[-_WINDOW:])
        self._pending: list[int] = []

    def add(self, ids: Sequence[int], *, more: bool) -> str:
        """Return the text that is sure after these tokens; with `more`, others will follow."""
        self._pending += ids
        if not self._pending:
            return ""
        text = self._codec.text_after(self._window, self._pending)
        if more and text.endswith(REPLACEMENT) and len(self._pending) < _MOST_PENDING:
            return ""
        self._window = [*self._window, *self._pending][-_WINDOW:]
        self._pending = []
        return text
