"""The command: python -m inference.certify."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export_scripts.commands import ProgressLine, accept_any_text, complain, parse_pair, say
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES

if TYPE_CHECKING:
    from inference.certify.certify import CertifyRequest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.certify",
        description=textwrap.dedent(
            """
            Prove that a folder is what its source says, whoever converted it.

            Every tensor of the folder is compared with what the source makes of it; then the
            settings that decide what is computed, the ids of probe texts, rendered chats, end
            tokens; then both sides are computed, and the first layer that differs is named.
            certificate.json and certificate.html say in their first line: equal, equal up to
            something, or what differs, and what could not be computed.

            With --endpoint, a running server of OpenAI's protocol (ours, vLLM's) is asked for the
            log probabilities of tokens, which are compared with the source's; with --training,
            with those that a training step computed. That needs neither SOURCE nor FOLDER.
            """
        ).strip(),
        epilog=textwrap.dedent(
            """
            exit status: 0 when everything that was asked was computed and is equal (up to what the
            first line says), 1 when something differs, 2 when the two cannot be compared, 3 when
            nothing differs and something could not be computed. An interrupted run goes on where
            it was.
            """
        ).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", nargs="?",
        help="the checkpoint: a .nemo archive, or a folder of any converted format")  # fmt: skip
    add("folder", type=Path, metavar="FOLDER", nargs="?",
        help="a Hugging Face folder, or one of shards such as out/1/2-gpu")  # fmt: skip
    add("--output", type=Path, metavar="DIR",
        help="where the certificate goes (default: FOLDER.certificate)")  # fmt: skip
    add("--no-layers", action="store_true", help="do not compute the two models")
    add("--data-type", choices=WEIGHT_DATA_TYPES, default="fp32",
        help="what a folder of shards is computed in (default fp32)")  # fmt: skip
    add("--tolerance", type=float, metavar="X",
        help="largest error of a layer, of its largest value (default by type: fp32 1e-4, "
        "fp16 1e-2, bf16 8e-2)")  # fmt: skip
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-ids", type=_ids, default=(), metavar="ID,ID,...",
        help="token ids to compute (default: 16 from all over the vocabulary)")  # fmt: skip
    prompt.add_argument("--text", help="text to compute, encoded by the folder's tokenizer")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="a config.ini value the source does not state, as for the conversion")  # fmt: skip
    add("--endpoint", metavar="URL", help="a running server, such as http://127.0.0.1:8000/v1")
    add("--model", help="its model (default: the only one)")
    add("--batch-sizes", type=_ids, default=(1, 8), metavar="N,N,...",
        help="rows of a request (default 1,8)")  # fmt: skip
    add("--log-prob-tolerance", type=float, default=0.1, metavar="X",
        help="largest difference of a token's log probability, in nats (default 0.1)")  # fmt: skip
    add("--token-file", type=Path, help="token for the server, in a file of mode 600")
    add("--training", type=Path, metavar="FILE",
        help="rows of token ids and log probabilities: JSON Lines, or a .pt of slime")  # fmt: skip
    add("--sign", type=Path, metavar="KEY",
        help="sign certificate.json with this key of OpenSSH (ssh-keygen -Y sign)")  # fmt: skip
    return parser


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write token ids with commas, such as 5,9,2"
        ) from None


def _request(options: argparse.Namespace) -> CertifyRequest:
    """Return what the options ask for. Raises ValueError."""
    from inference.certify.certify import CertifyRequest
    from inference.certify.served import Endpoint

    source, folder, url = options.source, options.folder, options.endpoint
    if (folder is None) and (source is not None or options.training is None):
        raise ValueError("name SOURCE and FOLDER, or --training FILE with --endpoint URL")
    if options.training is not None and url is None:
        raise ValueError("--training is compared with a server: name it by --endpoint URL")
    sibling = options.training if folder is None else folder
    ids = options.prompt_ids
    if options.text:
        from inference.backend.tokenizer import load_tokenizer

        ids = tuple(load_tokenizer(folder).encode(options.text))
    endpoint = url and Endpoint(
        url=url,
        model=options.model,
        batch_sizes=options.batch_sizes,
        tolerance=options.log_prob_tolerance,
        token_file=options.token_file,
    )
    return CertifyRequest(
        source=source and source.absolute(),
        folder=folder and folder.absolute(),
        output=options.output or sibling.absolute().with_name(f"{sibling.name}.certificate"),
        given=tuple(parse_pair(text, "--set") for text in options.given),
        data_type=options.data_type,
        tolerance=options.tolerance,
        prompt_ids=ids,
        computes=not options.no_layers,
        endpoint=endpoint,
        training=options.training,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify, print the certificate and return the exit status."""
    options = _parser().parse_args(arguments)
    accept_any_text()
    from inference.certify.certificate import EXIT_STATUS, certificate_text, write_certificate
    from inference.certify.certify import certify

    line = ProgressLine()
    try:
        request = _request(options)
        certificate = certify(request, line)
        line.close()
        files = write_certificate(certificate, request.output, options.sign)
    except (ValueError, OSError) as error:
        for each in str(error).split("\n"):
            complain(f"error: {each}")
        return 2
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to continue")
        return 130
    say(certificate_text(certificate))
    say(f"written: {', '.join(map(str, files))}")
    return EXIT_STATUS[certificate.status]


if __name__ == "__main__":
    sys.exit(main())
