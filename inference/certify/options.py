"""Options of a certificate, for the command and for the stage of a pipeline."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from foundations.values import NODE_CPUS, NODE_MEMORY_GB, Within, option

JOB_OPTIONS = ("name", "time_limit", "cpus_per_task", "mem_gb")


@dataclass
class CertifySection:
    """`certify`: the comparison of a folder with its source (conf/certify/<name>.yaml)."""

    name: str = option("name of the job", name=True)
    time_limit: Any = option("as in export.run")
    cpus_per_task: int | None = option("CPU cores of the job", None, within=(1, NODE_CPUS))
    mem_gb: float | None = option("memory of the job, in GB", None, within=(0, NODE_MEMORY_GB))
    source: str | None = option(
        "the checkpoint; null: export.model.checkpoint_path", None, path=True
    )
    folder: str | None = option(
        "the folder to certify, whoever made it; null: what convert makes", None, path=True
    )
    output_dir: str = option("where the certificate goes", path=True)
    layers: bool = option("compute both sides and compare every layer", True)
    tolerance: float | None = option(
        "largest error of a layer, of its largest value; null: fp32 1e-4, fp16 1e-2, bf16 8e-2",
        None,
        within=(1e-9, 1e9),
    )
    endpoint: str | None = option(
        "a running server of the folder, such as http://node1:8003/v1; null: none is asked", None
    )
    model: str | None = option("its model; null: the only one", None)
    batch_sizes: list[Annotated[int, Within(1, 2048)]] = option("rows of a request to it", [1, 8])
    log_prob_tolerance: float = option(
        "largest difference of a token's log probability, in nats", 0.1, within=(1e-9, 1e9)
    )
    token_file: str | None = option("token for it, in a file of mode 600", None, path=True)
    training: str | None = option(
        "log probabilities of a training step, to be compared with the server's", None, path=True
    )
    key: str | None = option("key of OpenSSH to sign with", None, path=True)


def endpoint_problems(options: CertifySection, prefix: str) -> Iterator[str]:
    """Yield the options that are given for a server, of which there is none."""
    for name in ("training", "model", "token_file"):
        if options.endpoint is None and getattr(options, name) is not None:
            key = f"{prefix}{name}"
            yield f"{key} is for a server: set {prefix}endpoint to its URL."
