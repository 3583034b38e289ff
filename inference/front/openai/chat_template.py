"""The chat template of a tokenizer: messages to the text that the model was trained on.

Templates come with checkpoints, which are not trusted: they run in Jinja's sandbox. What they have
in addition to Jinja's own is that of transformers (utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from export_scripts.ft.tokenizer_files import SETTINGS_FILE, TEMPLATE_FILE, tokenizer_settings
from inference.front.guard import RejectedError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_DEFAULT = "default"


class ChatTemplate:
    """A template, its `source`, and the special tokens that it may name.

    `end_token` ends an answer, as text; "" if the tokenizer's settings name none.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises ValueError if it is not one."""
        self.source = source
        self.end_token = tokens.get("eos_token", "")
        self._tokens = dict(tokens)
        self._template = _compiled(source)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for the answer to a conversation, unless the template refuses it."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        # Whatever a template does, from an addition of text to a number to endless recursion.
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError,
                AttributeError) as error:  # fmt: skip
            raise RejectedError(
                f"messages: the chat template refuses them: {error}", param="messages"
            ) from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the template of the tokenizer in a folder, None if it has none. Raises ValueError."""
    settings: dict[str, Any] = {}
    path, own = folder / SETTINGS_FILE, folder / TEMPLATE_FILE
    try:
        if path.is_file():
            settings = tokenizer_settings(path)
        source = own.read_text(encoding="utf-8") if own.is_file() else _source(settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer's settings in {folder} cannot be read: {error}") from error
    if source is None:
        return None
    tokens = {name: _text_of(settings.get(name)) for name in _SPECIAL_TOKENS}
    try:
        return ChatTemplate(source, {name: text for name, text in tokens.items() if text})
    except ValueError as error:
        raise ValueError(f"the chat template in {folder} is not one: {error}") from error


def _source(settings: Mapping[str, Any]) -> str | None:
    """Return the template in a tokenizer's settings: the only one, or the one called default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict) and each.get("name") == _DEFAULT]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _text_of(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        optimized=False,  # which would compute constants, however large, while it compiles
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ValueError(str(error)) from error


class _Generation(Extension):
    """The block in which templates mark the assistant's words, which only training uses."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Return the content of the block, as if the block were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; the arguments, and their order, are those of transformers' filter."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
