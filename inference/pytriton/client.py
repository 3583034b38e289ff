"""`python -m inference.pytriton.client`: send prompts to a text model for PyTriton's clients."""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from inference.client import add_connection_options, finished, opened_client, print_now
from inference.pytriton.repository import MAX_BATCH_SIZE
from inference.server.client import TritonClient
from inference.server.tensors import as_tensor

_POLL_S = 0.2
_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was",
    "The three primary colours are",
    "To cook rice, one needs",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 after a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.pytriton.client", description=__doc__
    )
    add_connection_options(parser)
    add = parser.add_argument
    add("--model-name", default="gpt2", help="name of the served model (default gpt2)")
    add("--init-timeout-s", type=float, default=600.0,
        help="how long to wait until the model is ready (default 600)")  # fmt: skip
    add("--prompts", nargs="+", default=list(_PROMPTS), metavar="PROMPT",
        help="texts to continue (default: four samples)")  # fmt: skip
    add("--output-len", type=int, default=30, help="new tokens (default 30)")
    add("--beam-width", type=int, default=1, help="answers to each prompt (default 1)")
    return finished(_ask, parser.parse_args(argv))


def _ask(arguments: argparse.Namespace) -> None:
    prompts = arguments.prompts
    with opened_client(
        arguments, default_protocol="http", model_name=arguments.model_name
    ) as client:
        _wait_until_ready(client, arguments.init_timeout_s)
        for first in range(0, len(prompts), MAX_BATCH_SIZE):
            texts = prompts[first : first + MAX_BATCH_SIZE]
            inputs = {
                "prompts": as_tensor(texts, "BYTES"),
                "request_output_len": as_tensor([arguments.output_len] * len(texts), "UINT32"),
                "beam_width": as_tensor([arguments.beam_width] * len(texts), "UINT32"),
            }
            outputs = client.infer(client.model_name, inputs)
            for row in range(len(texts)):
                print_now(f"================[ {first + row} ]================")
                for name, value in outputs.items():
                    flat = value[row].reshape(-1).tolist()
                    shown = [
                        e.decode(errors="replace") if isinstance(e, bytes) else e for e in flat
                    ]
                    text = shown[0] if len(shown) == 1 else json.dumps(shown, ensure_ascii=False)
                    print_now(f"{name}: {text}")


def _wait_until_ready(client: TritonClient, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    model = f"model {client.model_name} at {client.url}"
    if not client.is_ready(client.model_name):
        sys.stderr.write(f"waiting up to {timeout_s:g} s for {model}\n")
    while not client.is_ready(client.model_name):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{model} was not ready within {timeout_s:g} s; is the server running, and is that "
                "the name it gave the model?"
            )
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
