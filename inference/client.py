"""`python -m inference.client generate|stream|encode|request|health`: ask a Triton server.

Every option of the serving contract is a flag; the flags come from the signature table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.triton.signature import GPT, T5, TensorSignature, ensemble
from inference.serving.client import DEFAULT_IN_FLIGHT, PROTOCOLS, TritonClient

_PARSERS = {"UINT32": int, "INT32": int, "UINT64": int, "FP32": float}
_SHORT = {"runtime_top_k": "--top-k", "runtime_top_p": "--top-p", "random_seed": "--seed"}
_NOT_FLAGS = {"INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 after a failed request or 2 for wrong arguments."""
    from tritonclient.utils import InferenceServerException

    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (InferenceServerException, ConnectionError) as error:
        return _failed(f"{arguments.url or 'the server'}: {_server_words(error)}")
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130


def _server_words(error: Any) -> str:
    text = str(error if isinstance(error, ConnectionError) else error.message() or error)
    if "failed to connect" in text or "Connection refused" in text:
        return "no server answers there; is it running, and are host, port and protocol right?"
    return text


def _say(text: str = "", end: str = "\n") -> None:
    """Write to standard output at once, so that a stream is seen as it comes."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


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
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    generate.add_argument("--file", type=Path, help="further prompts, one on each line")
    generate.add_argument("--json", action="store_true", help="print a JSON list of lists of texts")
    generate.add_argument(
        "--rows-per-request", type=int, default=1, help="prompts in one request (default 1)"
    )
    generate.add_argument(
        "--in-flight", type=int, default=DEFAULT_IN_FLIGHT, help="requests sent at the same time"
    )
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

    health = commands.add_parser("health", help="say whether server and models are ready")
    health.set_defaults(run=_health)

    for command in (generate, stream, encode, request, health):
        _add_connection(command)
    return parser


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-u", "--url", help="host:port (default localhost:8001, http 8000)")
    parser.add_argument("-i", "--protocol", choices=PROTOCOLS, default=None)
    parser.add_argument("--timeout-s", type=float, default=None, help="limit of each request")


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


def _client(arguments: argparse.Namespace, **more: Any) -> TritonClient:
    return TritonClient(
        arguments.url,
        protocol=arguments.protocol or _protocol_of(arguments.url),
        timeout_s=arguments.timeout_s,
        **more,
    )


def _protocol_of(url: str | None) -> str:
    return "http" if url and url.startswith("http://") else "grpc"


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {tensor.name: getattr(arguments, tensor.name) for tensor in option_tensors()}
    loaded = {name: np.load(v) for name, v in options.items() if isinstance(v, Path)}
    words = {"bad_words": arguments.bad_words, "stop_words": arguments.stop_words}
    return options | loaded | words


def _generate(arguments: argparse.Namespace) -> int:
    prompts = list(arguments.prompts)
    if arguments.file:
        prompts += arguments.file.read_text().splitlines()
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
        reason = f": {model['reason']}" if model["reason"] else ""
        _say(f"{model['name']}: {model['state'] or 'not loaded'}{reason}")
    return 0 if ready else 1


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged in: dictionaries merge, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def file_tensors(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a request file's `request` list.

    Raises:
        ValueError: an entry lacks a key, or its data does not fit its dtype.
    """
    read = [_file_tensor(entry, f"request[{number}]") for number, entry in enumerate(entries)]
    if problems := [each for each in read if isinstance(each, str)]:
        raise ValueError("\n".join(problems))
    return dict(each for each in read if not isinstance(each, str))


def _file_tensor(entry: Mapping[str, Any], where: str) -> tuple[str, np.ndarray[Any, Any]] | str:
    """Return the name and value of an entry, or what is wrong with it."""
    if missing := [key for key in ("name", "data", "dtype") if key not in entry]:
        return f"{where}: key {missing[0]!r} is missing"
    name, data, dtype = str(entry["name"]), entry["data"], entry["dtype"]
    try:
        if dtype not in ("object", "bytes", "str"):
            return name, np.array(data, dtype=np.dtype(dtype))
        array = np.array(data, dtype=object)
    except (TypeError, ValueError, OverflowError) as error:
        return f"{where} ({name}): {error}"
    texts = [value.encode() if isinstance(value, str) else value for value in array.reshape(-1)]
    return name, np.array(texts, dtype=object).reshape(array.shape)


def _json(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} must hold a JSON object with 'config' and 'request'.")
    return value


def _request(arguments: argparse.Namespace) -> int:
    content = _json(arguments.file.read_text(), str(arguments.file)) if arguments.file else {}
    content = merged(content, _json(arguments.params, "--params"))
    config = content.get("config", {})
    known = {"protocol", "url", "model_name", "verbose", "stream_api"}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"config: unknown keys {', '.join(unknown)}; known: {sorted(known)}.")
    tensors = file_tensors(content.get("request", []))
    streams = bool(config.get("stream_api", False))
    default = "grpc" if streams else "http"
    client = TritonClient(
        arguments.url or config.get("url"),
        protocol=arguments.protocol or config.get("protocol", default),
        timeout_s=arguments.timeout_s,
    )
    model = config.get("model_name", "fastertransformer")
    with client:
        if streams:
            return _print_stream(client, model, tensors, test=arguments.test)
        for name, value in client.infer(model, tensors).items():
            _say(f"{name}:\n{value}\n")
    return 0


def _print_stream(
    client: TritonClient, model: str, tensors: Mapping[str, np.ndarray[Any, Any]], *, test: bool
) -> int:
    started = time.monotonic()
    shown: list[int] | None = None
    for frame in client.stream(model, tensors):
        tokens = frame["output_ids"][0, 0, : int(frame["sequence_length"][0, 0])]
        elapsed = time.monotonic() - started
        chance = f" (probability {np.exp(frame['cum_log_probs'][0, 0])})" if _scored(frame) else ""
        _say(f"[After {elapsed:.2f}s] Partial result{chance}:\n{tokens}\n")
        ids = tokens.tolist()
        if test and shown is not None and ids[:-1] != shown:
            return _failed(f"a frame does not add one token: {shown} became {ids}")
        shown = ids
    return 0


def _scored(frame: Mapping[str, Any]) -> bool:
    return "cum_log_probs" in frame


if __name__ == "__main__":
    sys.exit(main())
