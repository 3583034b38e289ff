"""Options of a certificate, for the command and for the stage of a pipeline."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from export_scripts.conversion.request import ConversionRequest
from foundations.values import INT32, TOKENS, Within, option
from inference.evaluation.options import OPENAI, AskingOptions


@dataclass(frozen=True)
class CertifySection(AskingOptions):
    """`certify`: the comparison of a folder with its source (conf/certify/<name>.yaml)."""

    source: str | None = option(
        "the checkpoint; null: export.model.checkpoint_path", None, is_path=True
    )
    folder: str | None = option(
        "the folder to certify, whoever made it; null: what convert makes", None, is_path=True
    )
    lora: list[str] = option(
        "LoRA adapters (PEFT, NeMo, Megatron Bridge) that the folder has merged, in order",
        [],
        is_path=True,
    )
    checkpoint_name: str | None = option("one of several checkpoints in the source", None)
    model_config: str | None = option("config.json of a source without one", None, is_path=True)
    vocab_path: str | None = option("vocabulary in place of the source's", None, is_path=True)
    merges_path: str | None = option("merges in place of the source's", None, is_path=True)
    output_dir: str = option("where the certificate goes", is_path=True)
    layers: bool = option("compute both sides and compare every layer", True)
    tolerance: float | None = option(
        "largest error of a layer, and of an answer by Triton's protocols, of its largest value; "
        "null: fp32 1e-4, fp16 1e-2, bf16 8e-2, int8 0.15",
        None,
        within=(1e-9, 1e9),
    )
    endpoint: str | None = option(
        "a running server of the folder, such as http://node1:8003/v1, or host:port for Triton's "
        "protocols; null: none is asked",
        None,
    )
    serve: bool = option("start what is exported as deploy does, and ask that server", False)
    protocol: str = option(
        "how to ask: openai, or Triton's grpc or http", OPENAI, choices=(OPENAI, "grpc", "http")
    )
    model: str | None = option("its model; null: the only one, Triton's fastertransformer", None)
    samples: int = option("rows of random token ids that it is asked", 8, within=(1, INT32))
    seed: int = option("seed of the rows", 1234, within=(0, (1 << 63) - 1))
    batch_sizes: list[Annotated[int, Within(1, 2048)]] = option("rows of a request to it", [1, 8])
    input_len: int = option("tokens of the longest row", 32, within=(2, TOKENS))
    min_input_len: int | None = option(
        "tokens of the shortest row; null: half of the longest", None, within=(2, TOKENS)
    )
    output_len: int = option("tokens of an answer by Triton's protocols", 8, within=(1, TOKENS))
    log_prob_tolerance: float = option(
        "largest difference of a token's log probability, in nats", 0.1, within=(1e-9, 1e9)
    )
    training: str | None = option(
        "log probabilities of a training step, to be compared with the server's", None, is_path=True
    )
    key: str | None = option("key of OpenSSH to sign with", None, is_path=True)


def source_request(
    options: CertifySection, given: Sequence[tuple[str, str]], **others: Any
) -> ConversionRequest:
    """Return a conversion that reads the source as it was read for the folder.

    `given` are config.ini values that the source does not state; `others` say what is made.
    """
    found = {name: getattr(options, name) for name in ("model_config", "vocab_path", "merges_path")}
    files: Any = {name: None if path is None else Path(path) for name, path in found.items()}
    return ConversionRequest(
        checkpoint_path=Path(str(options.source)),
        checkpoint_name=options.checkpoint_name,
        lora_checkpoints=tuple(map(Path, options.lora)),
        **files,
        allow=("*",),  # the conversion has logged what it left out
        allow_setting=("*",),
        given=tuple(given),
        **others,
    )


def endpoint_problems(options: CertifySection, prefix: str) -> Iterator[str]:
    """Yield the options that are given for a server, of which there is none, and wrong lengths."""
    for name in ("training", "model", "ca", "token_file"):
        if options.endpoint is None and getattr(options, name) is not None and not options.serve:
            key = f"{prefix}{name}"
            yield f"{key} is for a server: set {prefix}endpoint to its URL."
    if options.training is not None and options.protocol != OPENAI:
        yield f"{prefix}training compares what {prefix}protocol={OPENAI} answers; leave that out."
    if not options.batch_sizes:
        yield f"{prefix}batch_sizes is empty; name at least one, such as [1]."
    if (shortest := options.min_input_len) is not None and shortest > options.input_len:
        yield (
            f"{prefix}min_input_len={shortest} exceeds {prefix}input_len={options.input_len}; "
            "lower the one or raise the other."
        )
