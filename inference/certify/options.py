"""Options of a certificate, for the command and for the stage of a pipeline."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from export_scripts.conversion.request import ConversionRequest
from foundations.values import INT32, TOKENS, Within, option
from inference.evaluation.options import OPENAI, EndpointOptions


@dataclass(frozen=True)
class CertifySection(EndpointOptions):
    """`certify`: the comparison of a folder with its source (conf/certify/<name>.yaml)."""

    source: str | None = option(
        "the checkpoint; null: export.model.checkpoint_path", None, is_path=True
    )
    folder: str | None = option(
        "the folder to certify, from any converter; null: what convert makes", None, is_path=True
    )
    lora: list[str] = option(
        "LoRA adapters (PEFT, NeMo, Megatron Bridge) merged into the folder, in order",
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
        "largest error of a layer or of an answer by Triton's protocols, as a share of its largest "
        "value; null: fp32 1e-4, fp16 1e-2, bf16 8e-2, int8 0.15",
        None,
        within=(1e-9, 1e9),
    )
    endpoint: str | None = option(
        "a running server of the folder, such as http://node1:8003/v1, or host:port for Triton's "
        "protocols; null: no server is compared",
        None,
    )
    serve: bool = option("serve the export as deploy does, and compare that server", False)
    protocol: str = option(
        "protocol of the endpoint: openai, or Triton's grpc or http",
        OPENAI,
        choices=(OPENAI, "grpc", "http"),
    )
    model: str | None = option(
        "model of the endpoint; null: the only one, Triton's fastertransformer", None
    )
    samples: int = option("rows of random token ids sent to the endpoint", 8, within=(1, INT32))
    seed: int = option("seed of the rows", 1234, within=(0, (1 << 63) - 1))
    batch_sizes: list[Annotated[int, Within(1, 2048)]] = option("rows of a request", [1, 8])
    input_len: int = option("tokens of the longest row", 32, within=(2, TOKENS))
    min_input_len: int | None = option(
        "tokens of the shortest row; null: half of the longest", None, within=(2, TOKENS)
    )
    output_len: int = option("tokens of an answer by Triton's protocols", 8, within=(1, TOKENS))
    log_prob_tolerance: float = option(
        "largest difference of a token's log probability, in nats", 0.1, within=(1e-9, 1e9)
    )
    training: str | None = option(
        "log probabilities of a training step, to compare with the server's", None, is_path=True
    )
    key: str | None = option("OpenSSH key to sign the certificate with", None, is_path=True)


def source_request(
    options: CertifySection, given: Sequence[tuple[str, str]], **others: Any
) -> ConversionRequest:
    """Return a conversion request that reads the source as the folder's conversion read it.

    `given` are config.ini values that the source does not state, `others` fields of the output.
    """
    paths = {name: getattr(options, name) for name in ("model_config", "vocab_path", "merges_path")}
    files: Any = {name: None if path is None else Path(path) for name, path in paths.items()}
    return ConversionRequest(
        checkpoint_path=Path(str(options.source)),
        checkpoint_name=options.checkpoint_name,
        lora_checkpoints=tuple(map(Path, options.lora)),
        **files,
        allow=("*",),  # the conversion has logged the tensors that it left out
        allow_setting=("*",),
        given=tuple(given),
        **others,
    )


def endpoint_problems(options: CertifySection, name_of: Callable[[str], str]) -> Iterator[str]:
    """Yield problems of the options that concern a server; `name_of` spells their names."""
    for name in ("training", "model", "ca", "token_file"):
        if options.endpoint is None and getattr(options, name) is not None and not options.serve:
            yield f"{name_of(name)} is for a server: set {name_of('endpoint')} to its URL."
    if options.training is not None and options.protocol != OPENAI:
        needed = f"{name_of('protocol')}={OPENAI}"
        yield f"{name_of('training')} needs {needed}, not {options.protocol}."
    if not options.batch_sizes:
        yield f"{name_of('batch_sizes')} is empty; name at least one, such as [1]."
    if (shortest := options.min_input_len) is not None and shortest > options.input_len:
        longest = f"{name_of('input_len')}={options.input_len}"
        yield f"{name_of('min_input_len')}={shortest} exceeds {longest}; lower it."
