"""The command: python -m inference.certify."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundations.commands import ProgressLine, command_parser, parse_pair, run_command, say
from foundations.job_options import JOB_KEYS
from foundations.values import build_record, keys_of
from inference.certify.options import CertifySection

# Keys of the section that are positional, spelled differently, or only for a job.
_WITHOUT_FLAG = (*JOB_KEYS, "source", "folder", "output_dir", "serve")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "certify",
        """
        Prove that a converted folder equals its source, whichever program converted it.

        Every tensor of the folder is compared with the value that the source implies, then the
        settings that affect the computation, token ids of probe texts, rendered chats and end
        tokens. Both models are then run, and the first layer that differs is named. The first line
        of certificate.json and certificate.html says: equal, equal up to something, or what
        differs, and what could not be computed.

        With --endpoint, a running server of OpenAI's protocol (ours, vLLM's) is asked for the log
        probabilities of tokens, which are compared with the source's. With --training, they are
        compared with those of a training step, which needs neither SOURCE nor FOLDER. With
        --protocol grpc or http, a Triton server is asked for greedy answers, or an encoder's hidden
        states.
        """,
        """
        exit status: 0 when every requested part was computed and is equal (up to what the first
        line says), 1 when something differs, 2 when the two cannot be compared, 3 when nothing
        differs but a part could not be computed. An interrupted run resumes where it stopped.
        """,
        package="inference",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", nargs="?",
        help="the checkpoint: a .nemo archive, or a folder of any converted format")  # fmt: skip
    add("folder", metavar="FOLDER", nargs="?",
        help="a Hugging Face folder, or one of shards such as out/1/2-gpu")  # fmt: skip
    add("--output", metavar="DIR", dest="output_dir",
        help="where the certificate goes (default: FOLDER.certificate)")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="a config.ini value the source does not state, as for the conversion")  # fmt: skip
    for key in keys_of(CertifySection):
        flag, help_text = f"--{key.name.replace('_', '-')}", f"{key.text} (default {key.default})"
        if key.name in _WITHOUT_FLAG:
            continue
        if bool in key.kinds:
            add(flag, action=argparse.BooleanOptionalAction, help=help_text)
        else:
            number = next((kind for kind in (int, float) if kind in key.kinds), None)
            is_repeated = key.is_list and number is None
            kind = _integers if key.is_list and number else number or str
            add(flag, type=kind, action="append" if is_repeated else "store", metavar="X",
                help=help_text)  # fmt: skip
    return parser


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _section(values: dict[str, Any]) -> CertifySection:
    """Return the parsed options as a section. Raises ValueError if they are incomplete or wrong."""
    source, folder, training = map(values.get, ("source", "folder", "training"))
    if folder is None and ("endpoint" not in values if source else training is None):
        raise ValueError("name SOURCE and FOLDER, or SOURCE or --training FILE with --endpoint URL")
    sibling = Path(str(folder or source or training)).absolute()
    return build_record(
        CertifySection,
        {"output_dir": str(sibling.with_name(f"{sibling.name}.certificate")), **values},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify, print the certificate and return the exit status."""

    def handler(options: argparse.Namespace) -> int:
        from inference.certify.certificate import EXIT_STATUS, certificate_text, write_certificate
        from inference.certify.certify import certify

        values = {name: value for name, value in vars(options).items() if value is not None}
        given = tuple(parse_pair(text, "--set") for text in values.pop("given"))
        line = ProgressLine()
        try:
            certificate = certify(_section(values), given, line)
        finally:
            line.close()
        files = write_certificate(certificate)
        say(certificate_text(certificate))
        say(f"written: {', '.join(map(str, files))}")
        return EXIT_STATUS[certificate.status]

    return run_command(_parser(), handler, arguments, refused=2)


if __name__ == "__main__":
    sys.exit(main())
