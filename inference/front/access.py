"""Limits and credentials of clients, and settings of the endpoint of OpenAI's protocol."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

import argparse
import json
import re
import ssl
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

from foundations.files.json_content import json_object
from foundations.files.replace import read_file
from foundations.values import PORT, option
from inference.system.ports import DEFAULT_PORTS

MAX_REQUEST_MB = 1024
# 24 hexadecimal digits are 96 bits, too many to guess.
_MIN_TOKEN_CHARACTERS = 24
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-f:]+\](:[0-9]+)?")


@dataclass(frozen=True)
class Access:
    """Limits and credentials for a server's clients; keys of the configuration's section `deploy`.

    A request carries a token as `Authorization: Bearer <token>`.
    """

    max_request_mb: int = option(
        "largest request, uncompressed, in MiB", 128, within=(1, MAX_REQUEST_MB)
    )
    tls_cert: Path | None = option("certificate chain of the server, PEM", None, is_path=True)
    tls_key: Path | None = option("its key, PEM, of mode 600", None, is_path=True)
    token_file: Path | None = option(
        "accepted tokens, one on each line, of mode 600; a request must carry one",
        None,
        is_path=True,
    )
    otlp_collector: str | None = option(
        "collector of OpenTelemetry that gets a span for each request, http://host:4318", None
    )

    @property
    def max_request_bytes(self) -> int:
        """The largest request in bytes."""
        return self.max_request_mb << 20

    def problems(self, *, prefix: str = "deploy.", joiner: str = "_") -> list[str]:
        """Read the files and return every problem, each under its key or option."""
        size, cert, key, tokens = (
            prefix + name.replace("_", joiner)
            for name in ("max_request_mb", "tls_cert", "tls_key", "token_file")
        )
        found = []
        if self.otlp_collector is not None and not _is_origin(self.otlp_collector):
            name = prefix + f"otlp{joiner}collector"
            found.append(f"{name}={self.otlp_collector} is not an address; write http://host:port.")
        if not 1 <= self.max_request_mb <= MAX_REQUEST_MB:
            found.append(f"{size}={self.max_request_mb} must be 1 to {MAX_REQUEST_MB}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            found.append(
                f"{cert}={self.tls_cert or 'null'} and {key}={self.tls_key or 'null'}: TLS needs "
                "both files; give both, or none."
            )
        elif self.tls_key is not None:
            if problem := _secret_problem(self.tls_key):
                found.append(f"{key}={self.tls_key} {problem}")
            else:
                try:
                    self.ssl_context()
                except OSError as error:
                    found.append(
                        f"{cert}={self.tls_cert} and {key}={self.tls_key} are not a certificate in "
                        f"PEM and its key: {error}"
                    )
        return found + _token_problems(tokens, self.token_file)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the server's TLS context, None without TLS. Raises OSError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.tls_cert, self.tls_key)
        return context

    def tokens(self) -> tuple[str, ...] | None:
        """Return the accepted tokens, None if the server requires none. Raises ValueError."""
        return None if self.token_file is None else _read_tokens(self.token_file)


OPEN_ACCESS = Access()


def _is_origin(text: str) -> bool:
    with suppress(ValueError):  # the port is out of range
        return bool(_ORIGIN.fullmatch(text)) and urlsplit(text).port != 0
    return False


def access_of(values: Mapping[str, object]) -> Access:
    """Return the Access in `values`, which has at least its fields."""
    return Access(**{field.name: values[field.name] for field in fields(Access)})  # type: ignore[arg-type]


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of Access; `access_of` turns the parsed options into one."""
    kinds = {"max_request_mb": int, "otlp_collector": str}
    for field in fields(Access):
        kind = kinds.get(field.name, Path)
        text = field.metadata["text"]
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=field.default, help=f"{text} (%(default)s)")


def _read_tokens(path: Path) -> tuple[str, ...]:
    """Return a file's tokens, one per line. Raises ValueError, also if other users can read it."""
    if problem := _secret_problem(path):
        raise ValueError(problem)
    tokens = tuple(line.strip() for line in path.read_text("ascii").splitlines() if line.strip())
    if not tokens:
        raise ValueError("holds no token; write one on each line.")
    for number, token in enumerate(tokens, 1):
        if len(token) < _MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
            raise ValueError(
                f"has a token (number {number}) that is shorter than {_MIN_TOKEN_CHARACTERS} "
                "characters or holds spaces; `openssl rand -hex 32` makes a good one."
            )
    return tokens


def _token_problems(name: str, path: Path | None) -> list[str]:
    try:
        if path is not None:
            _read_tokens(path)
    except ValueError as error:
        return [f"{name}={path} {error}"]
    return []


def _secret_problem(path: Path) -> str | None:
    """Return why a file cannot hold a secret: it is unreadable, or other users can read it."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):  # opening a pipe would wait for its writer
            path.open("rb").close()
    except OSError as error:
        return f"cannot be read: {error.strerror}; give a file of yours, of mode 600."
    if not stat.S_ISREG(mode):
        return "is not a file."
    if mode & 0o077:
        return f"can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it."
    return None


@dataclass(frozen=True)
class Credentials:
    """A client's TLS settings and its token."""

    uses_tls: bool = False
    ca: Path | None = None  # trusted certificate authorities, PEM; None: this machine's
    token_file: Path | None = None  # mode 600; the client sends its first line

    def problems(self, *, prefix: str = "--", joiner: str = "-") -> list[str]:
        """Read the files and return every problem, each under its option."""
        found = _token_problems(f"{prefix}token{joiner}file", self.token_file)
        if self.ca is not None and not self.ca.is_file():
            found.append(f"{prefix}ca={self.ca} is not a file.")
        return found

    def headers(self) -> dict[str, str]:
        """Return the headers that authorize a request. Raises ValueError."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {_read_tokens(self.token_file)[0]}"}

    def client_arguments(self, protocol: str) -> dict[str, Any]:
        """Return the TLS arguments of tritonclient's client for `protocol`."""
        if not self.uses_tls:
            return {}
        ca = None if self.ca is None else str(self.ca)
        if protocol == "grpc":
            return {"ssl": True, "root_certificates": ca}
        from gevent.ssl import create_default_context

        return {"ssl": True, "ssl_context_factory": lambda: create_default_context(cafile=ca)}


PLAIN = Credentials()


def published_endpoint(path: Path, port: str) -> dict[str, Any]:
    """Return the endpoint.json of a deploy job, checked to have a `port` key.

    Raises OSError, or ValueError if the file is not an endpoint.json.
    """
    endpoint = json_object(read_file(path), path)
    problem = f"{path} is not the endpoint.json of a deploy job: "
    for key, kinds in (("host", str), ("uses_tls", bool), (port, (int, NoneType))):
        if key not in endpoint:
            raise ValueError(f"{problem}no {key} in it.")
        if not isinstance(value := endpoint[key], kinds):
            raise ValueError(f"{problem}its {key} is {str(value)[:40]}.")
    return endpoint


def _flag(text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise argparse.ArgumentTypeError(f"{text} is neither true nor false")


def _object(text: str) -> dict[str, Any]:
    try:
        return json_object(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Command-line flag and argparse keywords of each field of OpenAIOptions.
_OPENAI_ARGUMENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "port": ("--openai-port", {"type": int}),
    "tokenizer": ("--openai-tokenizer", {"type": Path}),
    "origins": ("--openai-origin", {"action": "append"}),
    "sampling_defaults": ("--openai-sampling-defaults", {"choices": ("model", "openai")}),
    "chat_template": ("--openai-chat-template", {"type": Path}),
    "access_log": ("--openai-access-log", {"type": _flag, "metavar": "true|false"}),
    "chat_template_kwargs": ("--openai-chat-template-kwargs", {"type": _object, "metavar": "JSON"}),
}


@dataclass(frozen=True)
class OpenAIOptions:
    """`deploy.openai`: an endpoint for OpenAI's protocol next to Triton's."""

    port: int = option("its port; 0 takes a free one", DEFAULT_PORTS["openai"], within=(0, PORT))
    tokenizer: Path | None = option(
        "folder of the tokenizer's files; null: the repository's own", None, is_path=True
    )
    enabled: bool = option("serve it", False)
    origins: list[str] = option(
        "web pages that may ask, as their browser names them: https://chat.example.org; [*]: all",
        [],
    )

    sampling_defaults: str = option(
        "what a request leaves open: model: as the model's generation_config.json says, else as "
        "OpenAI's API; openai: as OpenAI's API",
        "model",
        choices=("model", "openai"),
    )

    chat_template: Path | None = option(
        "file of a chat template in place of the tokenizer's own", None, is_path=True
    )
    chat_template_kwargs: dict[str, Any] = option(
        "variables of the chat template, such as enable_thinking; those of a request count", {}
    )

    access_log: bool = option("a line of JSON in the server's log for each request", False)

    def problems(self, *, prefix: str = "deploy.openai.") -> list[str]:
        """Return a problem for each malformed origin and each missing file."""
        is_option = prefix.startswith("--")
        name = "origin" if is_option else "origins"
        found = [
            f"{prefix}{name}: {origin!r} is not an origin; write https://host[:port], or *."
            for origin in self.origins
            if origin != "*" and not _ORIGIN.fullmatch(origin)
        ]
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            found.append(f"{prefix}tokenizer={self.tokenizer} is not a folder.")
        if self.chat_template is not None and not self.chat_template.is_file():
            name = "chat-template" if is_option else "chat_template"
            found.append(f"{prefix}{name}={self.chat_template} is not a file.")
        return found

    def arguments(self) -> list[str]:
        """Return the options as command-line arguments, without the port and without defaults."""
        defaults, found = OpenAIOptions(), []
        for name, (argument, _) in _OPENAI_ARGUMENTS.items():
            value = getattr(self, name)
            if name != "port" and value != getattr(defaults, name):
                values = value if isinstance(value, list) else [value]
                texts = (json.dumps(v) if isinstance(v, dict | bool) else v for v in values)
                found += [f"{argument}={text}" for text in texts]
        return found


def add_openai_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of OpenAIOptions; `openai_of` reads the parsed options."""
    texts = {field.name: field.metadata["text"] for field in fields(OpenAIOptions)}
    texts["port"] = "also serve OpenAI's protocol, on this port; 0 takes a free one"
    for name, (argument, keywords) in _OPENAI_ARGUMENTS.items():
        parser.add_argument(argument, dest=f"openai_{name}", help=texts[name], **keywords)


def openai_of(arguments: argparse.Namespace) -> OpenAIOptions | None:
    """Return the options of a parsed command line, None without a port."""
    stated = {name: getattr(arguments, f"openai_{name}") for name in _OPENAI_ARGUMENTS}
    if stated["port"] is None:
        return None
    return OpenAIOptions(**{name: value for name, value in stated.items() if value is not None})
