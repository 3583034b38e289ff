"""`mpirun -n N python -m inference.pytriton.server`: serve a model with PyTriton on N ranks.

Every rank is a process that the launcher starts. Rank 0 fetches and converts the model if need be,
and answers the clients; the others wait for it, load their parts, and end when it does.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from export_scripts.ft.config_ini import read_config
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from inference.backend.tokenizer import load_tokenizer
from inference.engine.engine import Engine, EngineFailedError, EngineOptions
from inference.gateway.access import access_of, add_access_options
from inference.launch_environment import (
    DEFAULT_PORT,
    LAUNCHER_VARIABLE,
    LaunchEnvironment,
    read_launch_environment,
    rendezvous_address,
)
from inference.process_memory import keep_loaded
from inference.pytriton.model_source import Wanted, parse_model_name, prepare_weights
from inference.pytriton.nemo_service import NemoDeployService, NemoService
from inference.pytriton.serving import Endpoint, ServingError, serve
from inference.pytriton.text_service import TextService
from inference.ranks.rendezvous import Rendezvous, RendezvousError
from inference.ranks.settings import Placement
from inference.ranks.worker import serve_started_rank

logger = logging.getLogger(__name__)

SERVICES = {"text": TextService, "nemo": NemoService, "nemo-deploy": NemoDeployService}
NEMO_NAME = "GPT"  # which the client of PyTriton's NeMo example asks for

_EPILOG = f"""
Start one process for each rank, TP x PP in all, with mpirun, srun or torchrun, on one node or
several. On several nodes they meet at MASTER_ADDR:MASTER_PORT (srun: the first node by default);
--output-dir must be a folder that all of them see. {LAUNCHER_VARIABLE}=mpirun|slurm|torchrun|
torch|pmi selects the launcher whose variables count where several are set.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return 0, 1 after a failure or 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        place = read_launch_environment(os.environ)
    except ValueError as error:
        return _refused(str(error))
    logging.basicConfig(
        level=logging.INFO if place.rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s",
        force=True,
    )
    if problem := _count_problem(arguments, place):
        # Rank 0 reports it for all: a launcher might end it first if another rank failed.
        return _refused(problem) if place.rank == 0 else 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _lead(arguments, place) if place.rank == 0 else _follow(arguments, place)
    except (ValueError, OSError, RendezvousError, ServingError, EngineFailedError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
    raise KeyboardInterrupt


def _refused(problem: str) -> int:
    sys.stderr.write(f"error: {problem}\n")
    return 2


def _count_problem(arguments: argparse.Namespace, place: LaunchEnvironment) -> str | None:
    """Return what is wrong with the number of processes, on all ranks alike."""
    tp, pp = arguments.tp, arguments.pp
    if min(tp, pp) < 1:
        return f"--tp={tp} and --pp={pp} must be at least 1"
    if tp * pp == place.world_size:
        return None
    started = f"{place.world_size} {'was' if place.world_size == 1 else 'were'} started"
    by = "" if place.launcher == "none" else f" by {place.launcher}"
    return (
        f"--tp={tp} x --pp={pp} = {tp * pp} ranks need as many processes, {started}{by}; start "
        f"them with `mpirun -n {tp * pp}` (or `srun -n {tp * pp}`), or change --tp and --pp, and "
        "let CUDA_VISIBLE_DEVICES show one GPU for each rank"
    )


def _lead(arguments: argparse.Namespace, place: LaunchEnvironment) -> int:
    if arguments.lib_path:
        logger.info("--lib-path has no effect: this project's own engine runs the model")
    name = parse_model_name(arguments.model)
    endpoint = Endpoint(
        name=arguments.model_name or (NEMO_NAME if arguments.interface == "nemo" else name.key),
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        instances=arguments.instances,
        merge_requests=arguments.merge_requests,
        access=access_of(vars(arguments)),
        sockets=arguments.sockets,
    )
    options = _engine_options(arguments)
    host, port = _rendezvous_address(arguments, place)
    rendezvous = None
    if place.world_size > 1:
        key_file = _key_file(arguments, port)
        rendezvous = Rendezvous(
            place, host, port, key_file=key_file, timeout_s=options.rank_timeout_s
        )
    try:
        endpoint.check()
        ft_dir = prepare_weights(
            Wanted(
                name=name,
                output_dir=arguments.output_dir,
                tp_size=arguments.tp,
                pp_size=arguments.pp,
                weight_data_type=arguments.weight_data_type,
                overwrite=arguments.overwrite,
                vocab_path=arguments.vocab_file,
                merges_path=arguments.merges_file,
            )
        )
        _load_and_serve(arguments, ft_dir.resolve(), options, endpoint, rendezvous)
    except BaseException as error:
        if rendezvous is not None:
            rendezvous.refuse(str(error) or "it was interrupted")
        raise
    return 0


def _load_and_serve(
    arguments: argparse.Namespace,
    ft_dir: Path,
    options: EngineOptions,
    endpoint: Endpoint,
    rendezvous: Rendezvous | None,
) -> None:
    tokenizer = load_tokenizer(ft_dir)
    _, config = read_config(ft_dir)
    engine = Engine(
        ft_dir,
        Placement(
            tp_size=arguments.tp,
            pp_size=arguments.pp,
            data_type=arguments.data_type or config.weight_data_type,
            device=arguments.device,
        ),
        options=options,
        rendezvous=rendezvous,
    )
    logger.info("loading %s", ft_dir)
    tasks = [task.task_name for task in config.tasks]
    with engine:
        keep_loaded()
        serve(endpoint, engine, SERVICES[arguments.interface](engine, tokenizer, tasks))


def _follow(arguments: argparse.Namespace, place: LaunchEnvironment) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    host, port = _rendezvous_address(arguments, place)
    timeout_s = _engine_options(arguments).rank_timeout_s
    key_file = _key_file(arguments, port)
    return serve_started_rank(place, host, port, key_file=key_file, timeout_s=timeout_s)


def _key_file(arguments: argparse.Namespace, port: int) -> Path:
    """Return where rank 0 leaves the key of the launch: a folder that all ranks see."""
    folder: Path = arguments.output_dir
    return folder.absolute() / f".rendezvous-{port}.key"


def _rendezvous_address(arguments: argparse.Namespace, place: LaunchEnvironment) -> tuple[str, int]:
    return rendezvous_address(
        place, os.environ, host=arguments.master_addr, port=arguments.master_port
    )


def _engine_options(arguments: argparse.Namespace) -> EngineOptions:
    given = {
        "max_lanes": arguments.max_lanes,
        "max_seq_len": arguments.max_seq_len,
        "kv_cache_bytes": arguments.kv_cache_bytes,
    }
    return EngineOptions(**{name: value for name, value in given.items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.pytriton.server", description=__doc__, epilog=_EPILOG
    )
    add = parser.add_argument
    add("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    add("--pp", type=int, default=1, help="pipeline-parallel size (default 1)")
    add("--hf-model-name", "--model-repo-id", dest="model", default="gpt2", metavar="MODEL",
        help="repository on the Hugging Face Hub, or repository:file for one file of it, or a "
        "local path: a folder, a .nemo archive, or a folder of converted weights (default "
        "gpt2)")  # fmt: skip
    add("--output-dir", type=Path, default=Path("ft_models"),
        help="where converted models are kept (default ft_models)")  # fmt: skip
    add("--model-name", help="name of the served model (default: MODEL, with _ for other than "
        f"letters and digits; with --interface nemo {NEMO_NAME})")  # fmt: skip
    add("--interface", choices=tuple(SERVICES), default="text",
        help="inputs and outputs of the model: text (default), nemo, those of PyTriton's NeMo "
        "example and its client, or nemo-deploy, those of NeMo's NemoQueryLLM")  # fmt: skip
    add("--overwrite", action="store_true", help="convert again what is there already")
    add("--vocab-file", type=Path, help="vocabulary in place of the model's own")
    add("--merges-file", type=Path, help="merges in place of the model's own")
    add("--lib-path", type=Path, help="accepted for FasterTransformer's scripts, has no effect")
    _add_engine(parser.add_argument_group("engine"))
    _add_server(parser.add_argument_group("server"))
    add_access_options(parser)
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--weight-data-type", choices=WEIGHT_DATA_TYPES, help="type of stored weights (fp32)")
    add("--data-type", choices=WEIGHT_DATA_TYPES,
        help="type to compute in (default: that of the stored weights)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto (default) uses GPUs where there are any")  # fmt: skip
    add("--max-seq-len", type=int, help="most tokens of a sequence (default: the model's, or 4096)")
    add("--max-lanes", type=int, help="most sequences that run at once (default 64)")
    add("--kv-cache-bytes", type=int, help="memory for keys and values on each rank")
    add("--master-addr", help="host where the ranks meet (default MASTER_ADDR, else loopback, or "
        "with srun the first node); rank 0 listens at this address alone")  # fmt: skip
    add("--master-port", type=int, help="port where the ranks meet (default MASTER_PORT, else "
        f"{DEFAULT_PORT}); two runs on one node need two")  # fmt: skip


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    plain = Endpoint("")
    add("--host", default=plain.host,
        help="address to listen at; by default all interfaces (0.0.0.0), as PyTriton does; give "
        "127.0.0.1 to serve this machine alone, or a --token-file")  # fmt: skip
    add("--http-port", type=int, default=plain.http_port, help="default 8000; 0 takes a free one")
    add("--grpc-port", type=int, default=plain.grpc_port, help="default 8001; 0 takes a free one")
    add("--metrics-port", type=int, default=plain.metrics_port, help="default 8002; 0: a free one")
    add("--instances", type=int, default=plain.instances,
        help="client requests worked on at the same time, each of up to 128 prompts (default 8); "
        "each takes a helper process of some 25 MB")  # fmt: skip
    add("--merge-requests", action="store_true",
        help="let requests that wait become one: more throughput from many small requests, but "
        "one that is refused has the others of its batch refused, too")  # fmt: skip
    add("--sockets", type=Path, help="folder for the sockets of the server's owner, to be made in "
        "one that its owner alone can enter (default: a new one)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
