"""`python -m inference.client generate|stream|encode|request|health`: ask a Triton server.

Every option of the serving contract is a flag; the flags come from the signature table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.commands import accept_any_text
from export_scripts.files.json_content import json_object
from export_scripts.triton.signature import GPT, T5, TensorSignature, ensemble
from inference.decoding.rows import SessionTurn
from inference.front.credentials import Credentials
from inference.request_file import file_tensors, merged
from inference.server.client import DEFAULT_IN_FLIGHT, DEFAULT_URLS, PROTOCOLS, TritonClient

_PARSERS = {"UINT32": int, "INT32": int, "UINT64": int, "FP32": float}
_SHORT = {"runtime_top_k": "--top-k", "runtime_top_p": "--top-p", "random_seed": "--seed"}
# Of a request file's `config`, for models that keep sessions.
_SESSION_KEYS = ("sequence_id", "sequence_start", "sequence_end")
_TLS_SCHEMES = {"https": "http", "grpcs": "grpc"}
_NOT_FLAGS = {"INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 after a failed request or 2 for wrong arguments."""
    from tritonclient.utils import InferenceServerException

    arguments = _parser().parse_args(argv)
    accept_any_text()
    try:
        return int(arguments.run(arguments))
    except (InferenceServerException, ConnectionError, socket.gaierror) as error:
        return _failed(f"{arguments.url or 'the server'}: {_server_words(error)}")
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except _NobodyReadsError:
        return 1
    except KeyboardInterrupt:
        return 130


class _NobodyReadsError(Exception):
    """Standard output was closed, as by `| head`."""


def _server_words(error: Any) -> str:
    text = str(error if isinstance(error, OSError) else error.message() or error)
    if "failed to connect" in text or "Connection refused" in text:
        return "no server answers there; is it running, and are host, port and protocol right?"
    if isinstance(error, socket.gaierror) or "DNS resolution failed" in text:
        return "no such host; write host:port, http://host:port or grpc://host:port"
    return text


def _say(text: str = "", end: str = "\n") -> None:
    """Write to standard output at once, so that a stream is seen as it comes."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer must not fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _NobodyReadsError from None


def _failed(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


def option_tensors() -> list[TensorSignature]:
    """Return every optional input that a text request can carry, by its contract name."""
    found: dict[str, TensorSignature] = {}
    for model in (GPT, T5):
        for tensor in ensemble(model).inputs:
            if tensor.optional and tensor.name not in _NOT_FLAGS:
                found.setdefault(tensor.name, tensor)
    return list(found.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.client", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="text in, text out, through the ensemble")
    _add_prompts(generate)
    _add_generation(generate)
    generate.set_defaults(run=_generate)

    stream = commands.add_parser("stream", help="print one text while it is generated")
    stream.add_argument("prompt", metavar="PROMPT")
    _add_generation(stream)
    stream.set_defaults(run=_stream)

    encode = commands.add_parser("encode", help="print the token ids of texts")
    encode.add_argument("texts", nargs="+", metavar="TEXT")
    encode.add_argument(
        "-m",
        "--model",
        default="preprocessing",
        help="preprocessing (default), or the tokenizer of an encoder",
    )
    encode.set_defaults(run=_encode)

    request = commands.add_parser("request", help="send the request in a JSON file")
    request.add_argument("file", type=Path, nargs="?", metavar="FILE.json")
    request.add_argument("--params", default="{}", help="JSON merged over the file")
    request.add_argument(
        "-t", "--test", action="store_true", help="fail unless each frame adds exactly one token"
    )
    request.set_defaults(run=_request)

    health = commands.add_parser("health", help="report whether server and models are ready")
    health.set_defaults(run=_health)

    for command in (generate, stream, encode, request, health):
        _add_connection(command)
    return parser


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-u",
        "--url",
        help="host:port (default localhost:8001, http 8000); https:// and grpcs:// use TLS",
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE.pem", help="use TLS, and trust these certificates alone"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="send the token in this file, of mode 600"
    )
    parser.add_argument("-i", "--protocol", choices=PROTOCOLS, default=None)
    parser.add_argument("--timeout-s", type=float, default=None, help="limit of each request")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    parser.add_argument("--file", type=Path, help="further prompts, one on each line")
    parser.add_argument("--json", action="store_true", help="print a JSON list of lists of texts")
    parser.add_argument(
        "--rows-per-request", type=int, default=1, help="prompts in one request (default 1)"
    )
    parser.add_argument(
        "--in-flight", type=int, default=DEFAULT_IN_FLIGHT, help="requests sent at the same time"
    )


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output-len", type=int, default=32, help="new tokens (default 32)")
    parser.add_argument("-m", "--model", default="ensemble", help="the ensemble (default ensemble)")
    parser.add_argument("--bad-words", help="words never to generate, one CSV record")
    parser.add_argument("--stop-words", help="words that end the answer, one CSV record")
    for tensor in option_tensors():
        flag = "--" + tensor.name.replace("_", "-")
        names = [flag, _SHORT[tensor.name]] if tensor.name in _SHORT else [flag]
        if tensor.dtype == "BOOL":
            action = argparse.BooleanOptionalAction
            parser.add_argument(*names, action=action, default=None, help=tensor.doc)
        elif tensor.dtype in _PARSERS:
            kind = _PARSERS[tensor.dtype]
            parser.add_argument(*names, type=kind, default=None, metavar="N", help=tensor.doc)
        else:
            parser.add_argument(*names, type=Path, metavar="FILE.npy", help=tensor.doc)


def _client(
    arguments: argparse.Namespace, *, default_protocol: str = "grpc", **more: Any
) -> TritonClient:
    """Return a connection to the server that the arguments name; a URL may name the protocol, too.

    Raises:
        ValueError: The URL has another form, or names another protocol than --protocol.
    """
    scheme, _, address = (arguments.url or "").rpartition("://")
    credentials = Credentials(
        uses_tls=scheme in _TLS_SCHEMES or arguments.ca is not None,
        ca=arguments.ca,
        token_file=arguments.token_file,
    )
    if problems := credentials.problems():
        raise ValueError(" ".join(problems))
    scheme = _TLS_SCHEMES.get(scheme, scheme)
    protocol = arguments.protocol or scheme or default_protocol
    if scheme not in ("", protocol) or protocol not in PROTOCOLS:
        raise ValueError(
            f"--url={arguments.url}: write host:port, http://host:port or grpc://host:port"
            + (f", as --protocol={arguments.protocol} is" if arguments.protocol else "")
        )
    if address and ":" not in address.rpartition("]")[2]:
        address += ":" + DEFAULT_URLS[protocol].rpartition(":")[2]
    arguments.url = address or DEFAULT_URLS[protocol]
    return TritonClient(
        arguments.url,
        protocol=protocol,
        timeout_s=arguments.timeout_s,
        credentials=credentials,
        **more,
    )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {tensor.name: getattr(arguments, tensor.name) for tensor in option_tensors()}
    loaded = {name: np.load(v) for name, v in options.items() if isinstance(v, Path)}
    words = {"bad_words": arguments.bad_words, "stop_words": arguments.stop_words}
    return options | loaded | words


def _generate(arguments: argparse.Namespace) -> int:
    prompts = list(arguments.prompts)
    if arguments.file:
        # Lines end with line feeds alone: other separators of Unicode belong to the text.
        prompts += _text(arguments.file).removesuffix("\n").split("\n")
    if not prompts:
        raise ValueError("no prompt: give at least one PROMPT, or --file with one on each line.")
    more = {"ensemble_name": arguments.model, "max_in_flight": arguments.in_flight}
    with _client(arguments, **more) as client:
        rows = client.generate_text(
            prompts,
            output_len=arguments.output_len,
            options=_options(arguments),
            rows_per_request=arguments.rows_per_request,
        )
    if arguments.json:
        _say(json.dumps(rows, ensure_ascii=False))
        return 0
    for number, texts in enumerate(rows):
        for beam, text in enumerate(texts):
            if len(rows) > 1 or len(texts) > 1:
                _say(f"[{number}]" if len(texts) == 1 else f"[{number}, beam {beam}]")
            _say(text)
    return 0


def _stream(arguments: argparse.Namespace) -> int:
    with _client(arguments, ensemble_name=arguments.model) as client:
        for piece in client.stream_text(
            arguments.prompt, output_len=arguments.output_len, options=_options(arguments)
        ):
            _say(piece, end="")
    _say()
    return 0


def _encode(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        for ids in client.encode(arguments.texts, model=arguments.model):
            _say(" ".join(map(str, ids)))
    return 0


def _health(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        models = client.models()
        ready = client.is_ready()
    _say("server is ready" if ready else "server is not ready")
    for model in models:
        _say(f"{model['name']}: {model['state'] or 'not loaded'}")
    return 0 if ready else 1


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _request(arguments: argparse.Namespace) -> int:
    content = json_object(arguments.file.read_bytes(), arguments.file) if arguments.file else {}
    content = merged(content, json_object(arguments.params, "--params"))
    config = content.get("config", {})
    known = {"protocol", "url", "model_name", "verbose", "stream_api", *_SESSION_KEYS}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"config: unknown keys {', '.join(unknown)}; known: {sorted(known)}.")
    turn = _turn(config)
    tensors = file_tensors(content.get("request", []))
    streams = bool(config.get("stream_api", False))
    arguments.url = arguments.url or config.get("url")
    arguments.protocol = arguments.protocol or config.get("protocol")
    client = _client(arguments, default_protocol="grpc" if streams else "http")
    model = config.get("model_name", "fastertransformer")
    with client:
        if streams:
            frames = client.stream(model, tensors, turn=turn)
            return _print_stream(frames, test=arguments.test)
        for name, value in client.infer(model, tensors, turn=turn).items():
            _say(f"{name}:\n{value}\n")
    return 0


def _turn(config: Mapping[str, Any]) -> SessionTurn | None:
    """Return the session that a request file names, for an interactive model."""
    if "sequence_id" not in config:
        if given := sorted(set(_SESSION_KEYS) & set(config)):
            raise ValueError(
                f"config: {', '.join(given)} without sequence_id, the session's number"
            )
        return None
    return SessionTurn(
        config["sequence_id"],
        starts=bool(config.get("sequence_start", False)),
        ends=bool(config.get("sequence_end", False)),
    )


def _print_stream(frames: Iterator[Mapping[str, np.ndarray[Any, Any]]], *, test: bool) -> int:
    started = time.monotonic()
    shown: list[int] | None = None
    for frame in frames:
        rows = frame["output_ids"]
        tokens = rows.reshape(-1, rows.shape[-1])[0, : int(frame["sequence_length"].flat[0])]
        elapsed = time.monotonic() - started
        scores = frame.get("cum_log_probs")
        chance = "" if scores is None else f" (probability {np.exp(scores.flat[0])})"
        _say(f"[After {elapsed:.2f}s] Partial result{chance}:\n{tokens}\n")
        ids = tokens.tolist()
        if test and shown is not None and ids[:-1] != shown:
            return _failed(f"a frame does not add one token: {shown} became {ids}")
        shown = ids
    return 0


if __name__ == "__main__":
    sys.exit(main())
