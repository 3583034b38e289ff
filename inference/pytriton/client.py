"""`python -m inference.pytriton.client`: send prompts to a model that PyTriton serves."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from inference.backend.text_signature import MAX_BATCH_SIZE
from inference.server.client import DEFAULT_URLS, TritonClient, as_tensor

_POLL_S = 0.2
_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was",
    "The three primary colours are",
    "To cook rice, one needs",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 after a failure."""
    from tritonclient.utils import InferenceServerException

    arguments = _parser().parse_args(argv)
    try:
        for index, answer in enumerate(_answers(arguments)):
            _say(f"================[ {index} ]================")
            for name, value in answer.items():
                _say(f"{name}: {value}")
    except InferenceServerException as error:
        return _failed(_reason(str(error.message() or error)))
    except (ValueError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _failed(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


def _reason(text: str) -> str:
    """Return the message of the error at the end of the tracebacks that PyTriton answers with."""
    _, mark, last = text.rpartition("Traceback (most recent call last):\n")
    if not mark:
        return text
    # Lines of the traceback are indented, those of the message are not, and an empty line ends it.
    message = [line for line in last.partition("\n\n")[0].splitlines() if line[:1] != " "]
    return re.sub(r"^[\w.]+: ", "", "\n".join(message)) or text


def _answers(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    protocol, _, address = arguments.url.rpartition("://")
    protocol = protocol or "http"
    if protocol not in DEFAULT_URLS:
        raise ValueError(f"--url={arguments.url}: write http://host:port or grpc://host:port")
    default_port = DEFAULT_URLS[protocol].partition(":")[2]
    url = address if ":" in address else f"{address}:{default_port}"
    with TritonClient(url, protocol=protocol, model_name=arguments.model_name) as client:
        _wait_until_ready(client, arguments.init_timeout_s)
        for first in range(0, len(arguments.prompts), MAX_BATCH_SIZE):
            yield from _ask(client, arguments, arguments.prompts[first : first + MAX_BATCH_SIZE])


def _wait_until_ready(client: TritonClient, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    if client.is_ready(client.model_name):
        return
    sys.stderr.write(
        f"waiting up to {timeout_s:g} s for model {client.model_name} at {client.url}\n"
    )
    while not client.is_ready(client.model_name):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"model {client.model_name} at {client.url} was not ready within {timeout_s:g} s; "
                "is the server running, and is that the name it gave the model?"
            )
        time.sleep(_POLL_S)


def _ask(
    client: TritonClient, arguments: argparse.Namespace, prompts: Sequence[str]
) -> Iterator[dict[str, Any]]:
    rows = len(prompts)
    outputs = client.infer(
        client.model_name,
        {
            "prompts": as_tensor(list(prompts), "BYTES"),
            "request_output_len": as_tensor([arguments.output_len] * rows, "UINT32"),
            "beam_width": as_tensor([arguments.beam_width] * rows, "UINT32"),
        },
    )
    for row in range(rows):
        yield {name: _shown(value[row]) for name, value in outputs.items()}


def _shown(value: np.ndarray[Any, Any]) -> str:
    """Return one value as it is, or those of several beams as JSON."""
    flat = value.reshape(-1).tolist()
    texts = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in flat]
    return str(texts[0]) if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.pytriton.client", description=__doc__
    )
    add = parser.add_argument
    add("--url", default="localhost",
        help="host, host:port, http://host:port or grpc://host:port (default localhost, which is "
        "http://localhost:8000)")  # fmt: skip
    add("--model-name", default="gpt2", help="name of the served model (default gpt2)")
    add("--init-timeout-s", type=float, default=600.0,
        help="how long to wait until the model is ready (default 600)")  # fmt: skip
    add("--prompts", nargs="+", default=list(_PROMPTS), metavar="PROMPT",
        help="texts to continue (default: four samples)")  # fmt: skip
    add("--output-len", type=int, default=30, help="new tokens (default 30)")
    add("--beam-width", type=int, default=1, help="answers to each prompt (default 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
