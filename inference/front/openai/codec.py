"""Translates between text and tokens with a served model's tokenizer and chat template.

Templates come with checkpoints, which are not trusted: they run in Jinja's sandbox. Their
additional filters and functions are those of transformers (utils/chat_template_utils.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError

from export_scripts.ft.generation_file import sampling_defaults
from export_scripts.ft.tokenizer_files import SETTINGS_FILE, TEMPLATE_FILE, tokenizer_settings
from inference.backend.tokenizer import REPLACEMENT, Tokenizer, load_tokenizer
from inference.front.guard import RejectedError
from inference.front.openai.requests import ChatRequest, Sampling

# Tokens of context that are enough to decode others as within a text: a character has at most four
# bytes, each possibly a token, and SentencePiece depends on the token before.
WINDOW = 8
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Codec:
    """Encodes prompts and decodes answers.

    Attributes:
        end_ids: tokens that end an answer and are not part of its text; the model's own is first.
        defaults: default values of request fields.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        end_ids: Sequence[int] = (),
        suffix: Sequence[int] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`suffix` are tokens to append to every prompt.

        The end token in the tokenizer's settings is added to `end_ids`.
        """
        self.tokenizer = tokenizer
        self._template = template
        self._suffix = tuple(suffix)
        self.defaults = dict(defaults or {})
        ids = tokenizer.encode(template.end_token) if template and template.end_token else []
        own = ids if len(ids) == 1 else ()
        self.end_ids = tuple(dict.fromkeys((*end_ids, *own)))
        self._hidden = tokenizer.special_ids | {*self.end_ids}

    def check_template(self) -> None:
        """Compile the chat template, if there is one. Raises ValueError if it is invalid."""
        try:
            _ = self._template and self._template.compiled
        except (TemplateError, RecursionError, ValueError) as error:
            raise ValueError(f"the chat template of the tokenizer is invalid: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the tokens of a prompt; with `special`, including the model's special tokens."""
        return (*self.tokenizer.encode(text, special=special), *self._suffix)

    def encode_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """Return the tokens of a conversation.

        Raises RejectedError without a chat template, or if the template refuses the messages.
        """
        if self._template is None:
            raise RejectedError(
                "the tokenizer of this model has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        prompt = self._template.render(
            [message.for_template() for message in request.messages],
            values=self._template.effort(request.reasoning_effort) | request.chat_template_kwargs,
            tools=[] if request.tool_choice == "none" else [t.model_dump() for t in request.tools],
            answers=request.add_generation_prompt,
            continues=request.continue_final_message,
        )
        # A template writes the special tokens itself.
        return tuple(self.tokenizer.encode(prompt, special=request.add_special_tokens))

    def description(self) -> dict[str, str | None]:
        """Return the end token, the begin token and the template, for /tokenizer_info."""
        end, prefix = self.end_ids[:1], self.tokenizer.prefix_ids
        return {
            "eos_token": self.tokenizer.decode(end) if end else None,
            "bos_token": self.tokenizer.decode(prefix[:1]) if prefix else None,
            "chat_template": None if self._template is None else self._template.source,
        }

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text; the text of the end token becomes the end token."""
        end = self.end_ids[:1]
        if end and text == self.tokenizer.decode(end):
            return [*end]
        return list(self.encode(text)) if special else self.tokenizer.encode(text)

    def shown(self, ids: Sequence[int], *, special: bool) -> list[int]:
        """Return the tokens that are part of the text; `special` includes special tokens."""
        return [*ids] if special else [index for index in ids if index not in self._hidden]

    def extended(
        self, window: list[int], start: str, ids: list[int], *, partial: bool = False
    ) -> tuple[str, str]:
        """Return the text of `window` followed by `ids`, and the part that `ids` add to `start`.

        `start` is the text of `window` alone.
        """
        whole = self.tokenizer.decode([*window, *ids], partial=partial)
        if whole.startswith(start):
            return whole, whole[len(start) :]
        return whole, self.tokenizer.decode(ids)

    def piece(self, before: Sequence[int], token: int) -> str:
        """Return the text that a token adds, including that of special tokens.

        A token that leaves a character incomplete adds nothing; the one that completes it adds the
        whole character.
        """
        window = list(before[-WINDOW:])
        start = self.tokenizer.decode(window, partial=True)
        return self.extended(window, start, [token], partial=True)[1]

    def name(self, before: Sequence[int], token: int) -> str:
        """Return the text that an alternative token would add, or else its text alone."""
        piece = self.piece(before, token)
        return self.tokenizer.decode([token]) if not piece or REPLACEMENT in piece else piece

    def bytes_of(self, token: int, piece: str) -> bytes:
        """Return the bytes of a token, which may be a part of a character.

        `piece` is the text that it adds, without the space that a tokenizer puts before a text.
        """
        own = self.tokenizer.token_bytes(token)
        is_part = own is not None and REPLACEMENT in own.decode(errors="replace")
        return own if own is not None and (is_part or REPLACEMENT in piece) else piece.encode()


@dataclass(frozen=True)
class CodecFiles:
    """The files of a codec; each process that needs the codec reads them once."""

    folder: Path
    kind: str | None = None  # of the tokenizer; None detects it
    end_ids: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    own_template: Path | None = None  # replaces the folder's chat template
    template_values: str = "{}"  # JSON
    uses_defaults: bool = True  # use the folder's generation_config.json
    changed_ns: int = 0  # latest modification time of the files; distinguishes changed ones

    def codec(self) -> Codec:
        """Return the codec. Raises ValueError if a file cannot be read."""
        return _codec(self)

    def load(self) -> None:
        """Read the files and compile the template; runs in a worker process.

        Raises ValueError for files that cannot be read or are invalid.
        """
        self.codec().check_template()


@functools.lru_cache(maxsize=2)  # enough for a repository and its successor
def _codec(files: CodecFiles) -> Codec:
    tokenizer = load_tokenizer(files.folder, kind=files.kind)
    values = json.loads(files.template_values)
    template = load_chat_template(files.folder, own=files.own_template, values=values)
    defaults = load_defaults(files.folder) if files.uses_defaults else {}
    return Codec(tokenizer, template, end_ids=files.end_ids, suffix=files.suffix, defaults=defaults)


def load_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of a folder's generation_config.json. Raises ValueError."""
    try:
        found = sampling_defaults(folder)
        Sampling.model_validate(found)
    except OSError as error:
        raise ValueError(f"generation_config.json in {folder} cannot be read: {error}") from error
    except ValidationError as error:
        wrong = ", ".join(
            f"{problem['loc'][0]} = {problem['input']!r:.40}" for problem in error.errors()
        )
        raise ValueError(
            f"generation_config.json in {folder}: {wrong} is outside of what requests may ask for; "
            "correct it, or ignore the file with deploy.openai.sampling_defaults=openai"
        ) from error
    return found


class ChatTemplate:
    """A chat template with its `source` and the special tokens that it may name.

    `end_token` is the text of the end token, "" if the tokenizer's settings name none.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], values: Mapping[str, Any] | None = None
    ) -> None:
        """The template is compiled on first use; `values` are defaults of its variables."""
        self._values = dict(values or {})
        self.source = source
        self.end_token = tokens.get("eos_token", "")
        self._tokens = dict(tokens)

    @functools.cached_property
    def _names(self) -> set[str]:
        """The variables that the template reads without setting them."""
        return find_undeclared_variables(self.compiled.environment.parse(self.source))

    @functools.cached_property
    def compiled(self) -> Template:
        """The compiled template. Raises TemplateError, RecursionError or ValueError if invalid.

        Jinja evaluates some constants while compiling: use it only in a worker process, whose time
        and memory are limited.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # the optimizer evaluates constant expressions, however large
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        }
        return environment.from_string(self.source)

    def effort(self, effort: str | None) -> dict[str, Any]:
        """Return the template variables for a request's `reasoning_effort`, as in vLLM.

        Raises RejectedError if the template reads none of them.
        """
        if effort is None:
            return {}
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if effort != "none" and not values.keys() & self._names:
            raise RejectedError(
                "reasoning_effort: the chat template does not read it", param="reasoning_effort"
            )
        return values

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        answers: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the prompt for a conversation. Raises RejectedError if the template refuses it.

        `values` are variables of the template. With `answers` the prompt ends with the beginning
        of an answer; with `continues` it ends inside the last message.
        """
        variables = {"documents": None, **self._values, **(values or {})}
        own = {"messages": messages,
               "tools": tools or None,
               "add_generation_prompt": answers, **self._tokens}  # fmt: skip
        try:
            if tools and "tools" not in self._names:
                raise RejectedError("tools: the chat template has no place for them", param="tools")
            rendered = self.compiled.render(variables | own)
            return _up_to(rendered, str(messages[-1]["content"])) if continues else rendered
        # A template can fail in many ways, from adding text to a number to endless recursion.
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError,
                AttributeError) as error:  # fmt: skip
            raise RejectedError(
                f"messages: the chat template refuses them: {error}", param="messages"
            ) from error


def load_chat_template(
    folder: Path, *, own: Path | None = None, values: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Return the chat template in a tokenizer's folder, or in the file `own`; None without one.

    `values` are defaults of its variables. Raises ValueError.
    """
    settings = {}
    path, own = folder / SETTINGS_FILE, own or folder / TEMPLATE_FILE
    read = path
    try:
        if path.is_file():
            settings = tokenizer_settings(path)
        source, read = settings.get("chat_template"), own
        if own.is_file():
            source = own.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{read} cannot be read: {error}") from error
    if isinstance(source, list):  # several templates: take the one named default
        named = (t for t in source if isinstance(t, dict) and t.get("name") == "default")
        source = next(named, {}).get("template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"chat_template in {path} is of type {type(source).__name__}, not a text")
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            tokens[name] = text
    return ChatTemplate(source, tokens, values)


class _Generation(Extension):
    """The block with which templates mark the assistant's words for training; it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Return the content of the block without the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; the arguments and their order are those of transformers' filter."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _up_to(prompt: str, text: str) -> str:
    """Cut a prompt after the text of its last message, as transformers does."""
    bare = text.strip()
    start = prompt.rindex(bare)
    message = text.lstrip() if prompt.startswith(text.lstrip(), start) else bare
    return prompt[: start + len(message)]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
