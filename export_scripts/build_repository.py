"""`python -m export_scripts.build_repository`: a Triton repository around converted weights."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.triton.object_store import parse_location, publish_repository
from export_scripts.triton.repository import (
    DATA_TYPES,
    ENGINES,
    RepositoryRequest,
    build_repository,
    check_repository,
)
from foundations.commands import command_parser, parse_pair, run_command, say

# Fields of the request as this command spells them.
_FIELDS = [field.name for field in dataclasses.fields(RepositoryRequest)]
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in _FIELDS if name != "parameters"} | {
    "tp_size": "--tensor-model-parallel-size",
    "pp_size": "--pipeline-model-parallel-size",
    "model_dir": "MODEL_DIR",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 with every problem on standard error."""
    return run_command(_parser(), _build, sys.argv[1:] if argv is None else argv)


def _build(arguments: argparse.Namespace) -> None:
    request = RepositoryRequest(
        **{name: getattr(arguments, name) for name in _FIELDS if name in arguments},
        parameters=dict(parse_pair(text, "--parameter") for text in arguments.parameter),
    )
    if problems := check_repository(request, names=_FLAGS):
        raise ValueError("\n".join(problems))
    location = None
    if arguments.publish:
        location = parse_location(arguments.publish)
    for folder in build_repository(request):
        say(str(folder))
    if location is not None:
        summary = publish_repository(
            request.model_dir.parent, location, overwrite=arguments.overwrite
        )
        say(f"{location.triton_url} ({summary.sent} of {summary.files} files sent)")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "build_repository",
        """
        Write a Triton model repository around converted weights: the model's configuration, and
        unless --no-ensemble the text models and the ensemble around it. The weights are where the
        repository keeps them, at MODEL_DIR/1/<N>-gpu. Rebuilding changes nothing.
        """,
        "exit status: 0 when built, 1 with every problem listed.",
    )
    add = parser.add_argument
    add("model_dir", type=Path, metavar="MODEL_DIR",
        help="<repository>/<model name>, with the weights at 1/<ranks>-gpu inside")  # fmt: skip
    for name, default, text in (
        ("tp_size", 1, "ranks that share each layer"),
        ("pp_size", 1, "groups of layers"),
        ("max_batch_size", 1, "most sequences of one request"),
        ("int8_mode", 0, "weight-only int8: 0 for none, 1 or 2"),
        ("enable_custom_all_reduce", 0, "0 or 1; the C++ backend's own reduction"),
        ("instance_count", 1, "instances of the model"),
        ("max_queue_delay_us", None, "switch the server's batcher on, with this delay"),
    ):
        add(_FLAGS[name], dest=name, type=int, default=default, metavar="N", help=text)
    add("--data-type", default="fp16", help=f"one of {', '.join(DATA_TYPES)}")
    add("--engine", default="pytorch", help=f"one of {', '.join(ENGINES)}")
    add("--ensemble", action=argparse.BooleanOptionalAction, default=True,
        help="also write the text models and their ensemble")  # fmt: skip
    for flag, text in (
        ("--decoupled", "stream: one response per token"),
        ("--answer-only", "leave the prompt out of the ensemble's text"),
        ("--interactive", "keep conversations between requests; needs --max-batch-size 1"),
        ("--overwrite", "replace a repository of another configuration"),
    ):
        add(flag, action="store_true", help=text)
    add("--absolute-path", dest="portable", action="store_false",
        help="name the weights by their absolute path")  # fmt: skip
    add("--publish", metavar="s3://BUCKET/PREFIX",
        help="then copy the repository to S3, or to another store: "
        "s3://http://HOST:PORT/BUCKET/PREFIX")  # fmt: skip
    add("--parameter", action="append", default=[], metavar="KEY=VALUE",
        help="further parameter of the model; repeat for more")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
