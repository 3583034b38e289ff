"""`python -m inference.client generate|stream|encode|request|health`: query a Triton server.

Every optional input of the served models is a flag; the flags come from the signature table.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.triton.signature import GPT, T5, TensorSignature, ensemble
from foundations.commands import run_command
from foundations.files.json_content import json_object
from inference.decoding.rows import SessionTurn
from inference.front.access import Credentials, published_endpoint
from inference.server.client import DEFAULT_IN_FLIGHT, DEFAULT_URLS, PROTOCOLS, TritonClient
from inference.server.tensors import file_tensors
from inference.system.ports import host_and_port

_PARSERS = {"UINT32": int, "INT32": int, "UINT64": int, "FP32": float}
_SHORT = {"runtime_top_k": "--top-k", "runtime_top_p": "--top-p", "random_seed": "--seed"}
# Keys of a request file's `config`; the session keys are for models with sessions.
_TEXT_KEYS = ("protocol", "url", "model_name")
_SESSION_KEYS = ("sequence_id", "sequence_start", "sequence_end")
_TLS_SCHEMES = {"https": "http", "grpcs": "grpc"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 after a failed request or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m inference.client", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    of = {name: commands.add_parser(name, help=text) for name, (_, text) in _COMMANDS.items()}
    add = of["generate"].add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    add("--file", type=Path, help="further prompts, one on each line")
    add("--json", action="store_true", help="print a JSON list of lists of texts")
    add("--in-flight", type=int, default=DEFAULT_IN_FLIGHT, help="requests sent at the same time")
    of["stream"].add_argument("prompt", metavar="PROMPT")
    _add_generation(of["generate"])
    _add_generation(of["stream"])
    add = of["encode"].add_argument
    add("texts", nargs="+", metavar="TEXT")
    add("-m", "--model", default="preprocessing",
        help="preprocessing (default), or the tokenizer of an encoder")  # fmt: skip
    add = of["request"].add_argument
    add("file", type=Path, nargs="?", metavar="FILE.json")
    add("--params", default="{}", help="JSON merged over the file")
    for name, command in of.items():
        command.set_defaults(run=_COMMANDS[name][0])
        add_connection_options(command)
    return run_command(parser, _run, argv)


def _run(arguments: argparse.Namespace) -> int | None:
    """Run a command; return its status. Raises ValueError without the server's answer."""
    from tritonclient.utils import InferenceServerException

    try:
        return arguments.run(arguments)  # type: ignore[no-any-return]
    except (InferenceServerException, ConnectionError, socket.gaierror) as error:
        words = str(error if isinstance(error, OSError) else error.message() or error)
        if "failed to connect" in words or "Connection refused" in words:
            words = "no server answers there; is it running, and are host, port and protocol right?"
        elif isinstance(error, socket.gaierror) or "DNS resolution failed" in words:
            words = "no such host; write host:port, http://host:port or grpc://host:port"
        raise ValueError(f"{arguments.url or 'the server'}: {words}") from error
    except HTTPException as error:
        raise ValueError(
            f"{arguments.url}: what answers there is not HTTP ({error}); is this the port?"
        ) from error
    except KeyboardInterrupt:
        return 130


def print_now(text: str = "", end: str = "\n") -> None:
    """Write to standard output and flush, so that streams show immediately.

    After standard output was closed, as by `| head`, the command ends with status 1.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer must not fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def option_tensors() -> list[TensorSignature]:
    """Return every optional input of a text request, in the names of the signature table."""
    inputs = [tensor for model in (T5, GPT) for tensor in ensemble(model).inputs]
    found = {tensor.name: tensor for tensor in inputs if tensor.optional}
    # Prompts, lengths and words have separate arguments.
    return [tensor for name, tensor in found.items() if not name.startswith("INPUT_")]


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `opened_client` reads."""
    add = parser.add_argument
    add("-u", "--url",
        help="host:port (default localhost:8001, http 8000), or the endpoint.json of a deploy job; "
        "https and grpcs use TLS")  # fmt: skip
    add("--ca", type=Path, metavar="FILE.pem", help="use TLS, and trust these certificates alone")
    add("--token-file", type=Path, metavar="FILE", help="send the token in this file, of mode 600")
    add("-i", "--protocol", choices=PROTOCOLS)
    add("--timeout-s", type=float, help="limit of each request")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output-len", type=int, default=32, help="new tokens (default 32)")
    add(
        "-m",
        "--model",
        default="ensemble",
        help="a model that takes and gives text (default ensemble)",
    )
    add("--bad-words", help="words never to generate, one CSV record")
    add("--stop-words", help="words that end the answer, one CSV record")
    for tensor in option_tensors():
        flag = "--" + tensor.name.replace("_", "-")
        names = [flag, _SHORT[tensor.name]] if tensor.name in _SHORT else [flag]
        if tensor.dtype == "BOOL":
            add(*names, action=argparse.BooleanOptionalAction, default=None, help=tensor.doc)
        elif tensor.dtype in _PARSERS:
            add(*names, type=_PARSERS[tensor.dtype], metavar="N", help=tensor.doc)
        else:
            add(*names, type=Path, metavar="FILE.npy", help=tensor.doc)


def opened_client(
    arguments: argparse.Namespace, *, default_protocol: str = "grpc", **more: Any
) -> TritonClient:
    """Return a client for the server in the arguments; a URL may also name the protocol.

    Raises ValueError for an invalid URL, or one whose protocol contradicts --protocol.
    """
    if (arguments.url or "").endswith(".json"):
        protocol = arguments.protocol or default_protocol
        endpoint = published_endpoint(Path(arguments.url), protocol)
        address = host_and_port(endpoint["host"], endpoint[protocol])
        arguments.url = f"{protocol}{'s' if endpoint['uses_tls'] else ''}://{address}"
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
    port = arguments.url.rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--url={arguments.url}: {port} is not a port; write a number up to 65535")
    more |= {"timeout_s": arguments.timeout_s, "credentials": credentials}
    return TritonClient(arguments.url, protocol=protocol, **more)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {tensor.name: getattr(arguments, tensor.name) for tensor in option_tensors()}
    loaded = {name: np.load(v) for name, v in options.items() if isinstance(v, Path)}
    words = {"bad_words": arguments.bad_words, "stop_words": arguments.stop_words}
    return options | loaded | words


def _generate(arguments: argparse.Namespace) -> None:
    prompts = list(arguments.prompts)
    if arguments.file:
        # Split at line feeds only: Unicode's other line separators belong to the text.
        prompts += arguments.file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if not prompts:
        raise ValueError("no prompt: give at least one PROMPT, or --file with one on each line.")
    more = {"ensemble_name": arguments.model, "max_in_flight": arguments.in_flight}
    with opened_client(arguments, **more) as client:
        rows = client.generate_text(
            prompts, output_len=arguments.output_len, options=_options(arguments)
        )
    if arguments.json:
        print_now(json.dumps(rows, ensure_ascii=False))
        return
    for number, texts in enumerate(rows):
        for beam, text in enumerate(texts):
            if len(rows) > 1 or len(texts) > 1:
                print_now(f"[{number}]" if len(texts) == 1 else f"[{number}, beam {beam}]")
            print_now(text)


def _stream(arguments: argparse.Namespace) -> None:
    with opened_client(arguments, ensemble_name=arguments.model) as client:
        for piece in client.stream_text(
            arguments.prompt, output_len=arguments.output_len, options=_options(arguments)
        ):
            print_now(piece, end="")
    print_now()


def _encode(arguments: argparse.Namespace) -> None:
    with opened_client(arguments) as client:
        for ids in client.encode(arguments.texts, model=arguments.model):
            print_now(" ".join(map(str, ids)))


def _health(arguments: argparse.Namespace) -> int:
    with opened_client(arguments) as client:
        models = client.models()
        ready = client.is_ready()
    print_now("server is ready" if ready else "server is not ready")
    for model in models:
        print_now(f"{model['name']}: {model['state'] or 'not loaded'}")
    return 0 if ready else 1


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged in: dictionaries merge, anything else is replaced."""
    inner = {
        key: merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **inner}


def _request(arguments: argparse.Namespace) -> None:
    content = json_object(arguments.file.read_bytes(), arguments.file) if arguments.file else {}
    content = merged(content, json_object(arguments.params, "--params"))
    if not isinstance(config := content.get("config", {}), dict):
        raise ValueError(f"config: {config!r} is not an object")
    known = {*_TEXT_KEYS, "verbose", "stream_api", *_SESSION_KEYS}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"config: unknown keys {', '.join(unknown)}; known: {sorted(known)}.")
    for key in _TEXT_KEYS:
        if not isinstance(config.get(key) or "", str):
            raise ValueError(f"config: {key}={config[key]!r} is not a text")
    turn = _turn(config)
    tensors = file_tensors(content.get("request", []))
    streams = bool(config.get("stream_api", False))
    arguments.url = arguments.url or config.get("url")
    arguments.protocol = arguments.protocol or config.get("protocol")
    client = opened_client(arguments, default_protocol="grpc" if streams else "http")
    model = config.get("model_name") or "fastertransformer"
    with client:
        if streams:
            _print_stream(client.stream(model, tensors, turn=turn))
            return
        for name, value in client.infer(model, tensors, turn=turn).items():
            print_now(f"{name}:\n{value}\n")


def _turn(config: Mapping[str, Any]) -> SessionTurn | None:
    session_id, *flags = (config.get(key) for key in _SESSION_KEYS)
    if session_id is not None:
        return SessionTurn(session_id, starts=bool(flags[0]), ends=bool(flags[1]))
    if stray := sorted(set(_SESSION_KEYS) & set(config)):
        raise ValueError(f"config: {', '.join(stray)} without sequence_id, the session's number")
    return None


def _print_stream(frames: Iterator[Mapping[str, np.ndarray[Any, Any]]]) -> None:
    started = time.monotonic()
    for frame in frames:
        rows = frame["output_ids"]
        tokens = rows.reshape(-1, rows.shape[-1])[0, : int(frame["sequence_length"].flat[0])]
        elapsed = time.monotonic() - started
        scores = frame.get("cum_log_probs")
        chance = "" if scores is None else f" (probability {np.exp(scores.flat[0])})"
        print_now(f"[After {elapsed:.2f}s] Partial result{chance}:\n{tokens}\n")


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str]] = {
    "generate": (_generate, "text in, text out, through the ensemble"),
    "stream": (_stream, "print one text while it is generated"),
    "encode": (_encode, "print the token ids of texts"),
    "request": (_request, "send the request in a JSON file"),
    "health": (_health, "report whether server and models are ready"),
}


if __name__ == "__main__":
    sys.exit(main())
