"""`python -m inference.pytriton.server`: serve a model by name, from text to text.

It downloads and converts the model if needed, and serves it as `inference.server` does. Each of TP
x PP processes that mpirun, srun or torchrun start is one rank; started directly, it starts all
ranks on this node.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.conversion.request import ConversionRequest
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from inference.pytriton.model_source import parse_model_name, prepare_weights
from inference.pytriton.repository import INTERFACES, NEMO_NAME, write_text_repository
from inference.ranks.launched_rank import main as serve_rank
from inference.server.__main__ import (
    add_server_options,
    serve_until_signal,
    server_of,
)
from inference.server.kinds import AUTO, chosen_server
from inference.system.control_groups import usable_cores
from inference.system.launch_environment import (
    DEFAULT_PORT,
    KEY_FILE_VARIABLE,
    LAUNCHER_VARIABLE,
    RENDEZVOUS_VARIABLE,
    LaunchEnvironment,
    read_launch_environment,
    rendezvous_address,
)
from inference.system.ports import TakenPort, port_problem
from inference.system.private_folder import PrivateFolder

_EPILOG = f"""
On several nodes the ranks meet at MASTER_ADDR:MASTER_PORT (srun: the first node by default);
--output-dir must be a folder that all of them see. {LAUNCHER_VARIABLE}=mpirun|slurm|torchrun|
torch|pmi selects the launcher whose variables count where several are set.
"""
_READY_S = 3600.0
_MAX_WORKERS = 8
_DRAIN_S = 25.0
_ENGINE = ("device", "max_seq_len", "max_lanes", "kv_cache_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return 0, 1 after a failure or 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        place = read_launch_environment(os.environ)
        if place.world_size > 1:
            host, port = rendezvous_address(
                place, os.environ, host=arguments.master_addr, port=arguments.master_port
            )
    except ValueError as error:
        return _refused(str(error))
    if problem := _count_problem(arguments, place):
        # Only rank 0 reports it and fails: a launcher might end rank 0 first if another one failed.
        return _refused(problem) if place.rank == 0 else 0
    if place.world_size > 1:
        key_file = arguments.output_dir.absolute() / f".rendezvous-{port}.key"
        os.environ |= {RENDEZVOUS_VARIABLE: f"{host}:{port}", KEY_FILE_VARIABLE: str(key_file)}
    if place.rank > 0:
        return serve_rank()
    if place.world_size > 1 and isinstance(problem := port_problem(host, port), TakenPort):
        sys.stderr.write(f"error: port {port} of the rendezvous {problem}; choose another one\n")
        return 1  # the rank that holds the port refuses the other ranks
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rank 0 %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status, reason = 1, "the server has ended; its output has the reason"
    try:
        status = _lead(arguments)
    except (ValueError, OSError) as error:
        reason = str(error)
        sys.stderr.write(f"error: {error}\n")
    except KeyboardInterrupt:
        status, reason = 130, "it was interrupted"
    if status:
        _call_off(place, reason)
    return status


def _refused(problem: str) -> int:
    sys.stderr.write(f"error: {problem}\n")
    return 2


def _count_problem(arguments: argparse.Namespace, place: LaunchEnvironment) -> str | None:
    """Return why the number of processes is wrong, None if it is right; the same on all ranks."""
    tp, pp = arguments.tp, arguments.pp
    if min(tp, pp) < 1:
        return f"--tp={tp} and --pp={pp} must be at least 1"
    if place.launcher == "none" or tp * pp == place.world_size:
        return None
    started = f"{place.world_size} {'was' if place.world_size == 1 else 'were'} started"
    return (
        f"--tp={tp} x --pp={pp} = {tp * pp} ranks need as many processes, {started} by "
        f"{place.launcher}; start them with `mpirun -n {tp * pp}` (or `srun -n {tp * pp}`), or "
        "change --tp and --pp, and let CUDA_VISIBLE_DEVICES show one GPU for each rank"
    )


def _lead(arguments: argparse.Namespace) -> int:
    name = parse_model_name(arguments.model)
    folder = PrivateFolder("pytriton")
    try:
        server = server_of(
            arguments,
            folder.path / "repository",
            kind=chosen_server(AUTO, needs_triton=False),
            log_path=folder.path / "server.log",
        )
        if problems := server.port_problems():
            raise ValueError("\n".join(problems))
        weights = prepare_weights(
            name,
            ConversionRequest(
                Path(name.text),
                arguments.output_dir / name.key,
                arguments.tp,
                arguments.weight_data_type or "fp32",
                pp_size=arguments.pp,
                processes=min(_MAX_WORKERS, usable_cores()),
                overwrite=arguments.overwrite,
                vocab_path=arguments.vocab_file,
                merges_path=arguments.merges_file,
            ),
            stored_type=arguments.weight_data_type,
        )
        write_text_repository(
            folder.path / "repository",
            weights,
            name=arguments.model_name or (NEMO_NAME if arguments.interface == "nemo" else name.key),
            interface=arguments.interface,
            tp_size=arguments.tp,
            pp_size=arguments.pp,
            data_type=arguments.data_type,
            parameters={key: getattr(arguments, key) for key in _ENGINE},
        )
        return serve_until_signal(server, ready_timeout_s=_READY_S, drain_s=_DRAIN_S)
    finally:
        folder.remove()


def _call_off(place: LaunchEnvironment, reason: str) -> None:
    """Send the other ranks, which wait for the model, the reason of the failure."""
    from inference.ranks.launched_rank import open_rendezvous
    from inference.ranks.rendezvous import RendezvousError
    from inference.ranks.settings import RANK_TIMEOUT_S

    if place.world_size > 1:
        with contextlib.suppress(RendezvousError):  # the model had opened it before it ended
            rendezvous = open_rendezvous(place.world_size, timeout_s=RANK_TIMEOUT_S)
            assert rendezvous is not None
            rendezvous.refuse(reason)


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
        help="folder for converted models (default ft_models)")  # fmt: skip
    add("--model-name", help="name of the served model (default: MODEL, with _ for everything but "
        f"letters and digits; with --interface nemo {NEMO_NAME})")  # fmt: skip
    add("--interface", choices=tuple(INTERFACES), default="text",
        help="inputs and outputs of the model: text (default), nemo, those of PyTriton's NeMo "
        "example and its client, or nemo-deploy, those of NeMo's NemoQueryLLM")  # fmt: skip
    add("--overwrite", action="store_true", help="convert again even if converted weights exist")
    add("--vocab-file", type=Path, help="vocabulary instead of the model's own")
    add("--merges-file", type=Path, help="merges instead of the model's own")
    add("--lib-path", type=Path, help="accepted for FasterTransformer's scripts, has no effect")
    add("--instances", type=int, help="accepted for PyTriton's, has no effect: requests run "
        "together, up to --max-lanes sequences")  # fmt: skip
    add("--weight-data-type", choices=WEIGHT_DATA_TYPES, help="type of stored weights (fp32)")
    add("--data-type", choices=WEIGHT_DATA_TYPES,
        help="type to compute in (default: that of the stored weights)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto (default) uses GPUs if there are any")  # fmt: skip
    add("--max-seq-len", type=int, help="maximum tokens of a sequence (default: the model's, or "
        "4096)")  # fmt: skip
    add("--max-lanes", type=int, help="maximum number of concurrent sequences (default 64)")
    add("--kv-cache-bytes", type=int, help="memory for keys and values on each rank")
    add("--master-addr", help="host where the ranks meet (default MASTER_ADDR, else loopback, or "
        "with srun the first node); rank 0 listens at this address alone")  # fmt: skip
    add("--master-port", type=int, help="port where the ranks meet (default MASTER_PORT, else "
        f"{DEFAULT_PORT}); two runs on one node need two")  # fmt: skip
    add_server_options(parser, host="0.0.0.0")  # as PyTriton does
    return parser


if __name__ == "__main__":
    sys.exit(main())
