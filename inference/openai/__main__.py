"""`python -m inference.openai`: an OpenAI-compatible endpoint in front of a Triton server.

`deploy` starts it next to its server when `deploy.openai.enabled=true`. At SIGTERM or Ctrl-C it
accepts no more requests, and ends when the running ones are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from inference.gateway.access import Access, add_access_options
from inference.gateway.process import IDLE_S, LONGEST_REQUEST_S, Stop, run
from inference.gateway.sockets import ServerSockets
from inference.openai.app import OpenAIEndpoint
from inference.openai.options import DEFAULT_PORT


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return 0, 1 if that is impossible or 2 for wrong arguments."""
    return run(
        _parser().parse_args(argv),
        _serve,
        failure="the OpenAI endpoint cannot serve",
        errors=(OSError, ValueError),
    )


async def _serve(arguments: argparse.Namespace, access: Access) -> None:
    stop = Stop(arguments.lifeline)
    ending = asyncio.ensure_future(stop.wait())
    endpoint = asyncio.ensure_future(_endpoint(arguments, access))
    await asyncio.wait([ending, endpoint], return_when=asyncio.FIRST_COMPLETED)
    if not endpoint.done():
        endpoint.cancel()
        return
    runner = web.AppRunner(
        endpoint.result().application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=LONGEST_REQUEST_S,
    )
    await runner.setup()
    await web.TCPSite(
        runner, arguments.host, arguments.port, ssl_context=access.ssl_context()
    ).start()
    if arguments.listening is not None:
        arguments.listening.touch()
    await ending
    await stop.finish(runner.cleanup())


async def _endpoint(arguments: argparse.Namespace, access: Access) -> OpenAIEndpoint:
    """Return the endpoint once its server is ready. Raises ValueError if it has no text model."""
    from inference.backend.tokenizer import load_tokenizer
    from inference.openai.chat_template import load_chat_template
    from inference.openai.codec import Codec
    from inference.openai.served import (
        PREPROCESSING,
        is_ready,
        ready_client,
        served_models,
        text_parameters,
    )

    client = await ready_client(arguments.triton)
    repository = arguments.repository
    models = await served_models(client, repository)
    if not models:
        raise ValueError("the repository has no model that completes token ids without sessions")
    parameters = await text_parameters(client)
    folder = arguments.tokenizer
    if folder is None and repository is not None:
        folder = repository / PREPROCESSING / "1" / parameters.get("tokenizer_path", ".")
    if folder is None or not folder.is_dir():
        raise ValueError(
            "the repository has no folder with a tokenizer that could be read here; export it with "
            "its text models (export.triton_deployment.ensemble=true), or name a folder with the "
            "tokenizer's files: --tokenizer, deploy.openai.tokenizer"
        )
    end_id = int(parameters["end_id"]) if "end_id" in parameters else None
    appends = parameters.get("append_end_id", "0") == "1" and end_id is not None
    codec = Codec(
        load_tokenizer(folder, kind=parameters.get("tokenizer_type") or None),
        load_chat_template(folder),
        end_id=end_id,
        suffix=(end_id,) if appends and end_id is not None else (),
    )
    named = {model.facts.name: model for model in models}
    unready = None  # a gateway at a port has read it before it answers
    if arguments.triton.startswith("unix:"):
        unready = ServerSockets(Path(arguments.triton.removeprefix("unix:")).parent).unready
    return OpenAIEndpoint(
        named,
        codec,
        access,
        listens_at=arguments.host,
        is_ready=partial(is_ready, client, unready),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.openai", description=__doc__)
    add = parser.add_argument
    add("--triton", default="localhost:8001", metavar="ADDRESS",
        help="gRPC of the server, host:port or unix:PATH (%(default)s)")  # fmt: skip
    add("--repository", type=Path, help="folder of the models that it serves")
    add("--tokenizer", type=Path, help="folder of the tokenizer, if not the repository's own")
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="(%(default)s)")
    add("--listening", type=Path, metavar="FILE", help="write an empty file once it listens")
    add("--lifeline", type=int, metavar="FD",
        help="end when the other end of this pipe is closed")  # fmt: skip
    add_access_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
