"""Conversion speed and memory, against a durable plain copy and NVIDIA's converter.

    python -m benchmarks.convert --work-dir DIR [--peer-path FasterTransformer] [--repeats 3]
    python -m benchmarks.convert --work-dir DIR --size-gb 0.1 1 3

A random fp16 GPT-2, or with `--family llama` a Llama, is written as a Hugging Face folder and as a
torch_dist checkpoint (.metadata, *.distcp). Each round then times whole processes in turn: `cp -r`
followed by `sync -f`, this project's converter (which also syncs), and the peer's (which does not)
at each requested number of worker processes. The source is in the page cache for all of them. An
additional run of each measures memory, because sampling it takes time.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.program import ROOT, Cell, Options, run
from export_scripts.convert import default_workers
from export_scripts.families.table import FAMILIES
from export_scripts.ft.layout import ft_directory
from export_scripts.synthesize import synthesize, synthetic_config
from inference.server.processes import descendants

_SAMPLE_S = 0.01
_VOCAB, _POSITIONS = 51200, 2048
_HUGGING_FACE = ("--output-format", "huggingface")
_TORCH_DIST = ("--output-format", "torch_dist")


def write_source(name: str, size_gb: float, work_dir: Path) -> tuple[Path, Path, Path]:
    """Write a model of about `size_gb` 10^9 bytes in fp16; return folder, shards, torch_dist."""
    folder, hidden = work_dir / f"{name}_{size_gb:g}gb", 2048 if size_gb >= 1 else 512
    embedded = (_VOCAB + _POSITIONS) * hidden
    matrices = 12 if name == "gpt" else 16  # of hidden x hidden in a layer
    layers = max(2, round((size_gb * 1e9 / 2 - embedded) / (matrices * hidden * hidden)))
    shards, source, saved = ft_directory(folder, 1), folder / "huggingface", folder / "torch_dist"
    if not saved.exists():
        family, heads = FAMILIES[name], hidden // 64
        config = synthetic_config(
            family, hidden=hidden, layers=layers, heads=heads, vocab=_VOCAB, positions=_POSITIONS
        )
        synthesize(family, config, folder)
        subprocess.run(our_command(shards, folder, 1, *_HUGGING_FACE), cwd=ROOT, check=True)
        subprocess.run(our_command(source, folder, 1, *_TORCH_DIST), cwd=ROOT, check=True)
    return source, shards, saved


def _resident_bytes(pid: int) -> int:
    """Return a process's proportional set size, which includes mapped files, in bytes."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def run_command(command: list[str], log: Path, *, sampled: bool = False) -> tuple[float, int]:
    """Run a command; return its time in seconds, and its peak memory in bytes if `sampled`.

    Sampling slows the process down.

    Raises:
        RuntimeError: the command failed; the message has its last lines.
    """
    with log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        peak_bytes = 0
        while sampled and process.poll() is None:
            pids = [process.pid, *descendants(process.pid)]
            peak_bytes = max(peak_bytes, sum(map(_resident_bytes, pids)))
            time.sleep(_SAMPLE_S)
        status = process.wait()
        seconds = time.perf_counter() - start
    if status:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} exited with {status}:\n{tail}")
    return seconds, peak_bytes


def copy_command(source: Path, target: Path) -> list[str]:
    """Return the command of a plain copy that is synced to the disk."""
    return ["bash", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source), str(target)]


def our_command(source: Path, target: Path, processes: int, *form: str) -> list[str]:
    """Return the command of this project's conversion to a format."""
    return [
        *(sys.executable, "-m", "export_scripts.convert", *form),
        *("--checkpoint-path", str(source), "--output-dir", str(target)),
        *("--weight-data-type", "fp16", "--processes", str(processes)),
    ]


def commands(
    args: argparse.Namespace, source: Path, shards: Path, target: Path
) -> dict[str, list[str]]:
    """Return the command of each contender by its name."""
    ranks, workers = ("--tensor-model-parallel-size", str(args.tp)), args.processes
    table = {
        "cp -r and sync": copy_command(source, target),
        f"slipway, {workers} workers": our_command(source, target, workers, *ranks),
        "slipway, shards to Hugging Face": our_command(shards, target, workers, *_HUGGING_FACE),
        "slipway, Hugging Face to torch_dist": our_command(source, target, workers, *_TORCH_DIST),
    }
    for processes in args.peer_processes if args.peer_path else ():
        script = args.peer_path / "examples/pytorch/gpt/utils/huggingface_gpt_convert.py"
        table[f"NVIDIA, {processes} workers"] = [
            *(sys.executable, str(script), "-i", str(source), "-o", str(target)),
            *("-i_g", str(args.tp), "-weight_data_type", "fp16", "-p", str(processes)),
        ]
    return table


def remove(path: Path) -> None:
    """Remove a file or a folder, and sync the disk."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    subprocess.run(["sync", "-f", str(path.parent)], check=True)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of every contender for each size of checkpoint."""
    target = args.work_dir / "output"
    for size_gb in args.size_gb:
        source, shards, saved = write_source(args.family, size_gb, args.work_dir)
        yield from measure_table(args, commands(args, source, shards, target), source, target)
        yield from measure_saved(args, "torch_dist", saved, target)
        if not args.keep:
            remove(source.parent)
    if args.archive:
        yield from measure_saved(args, "archive", args.archive, target)


def measure_saved(
    args: argparse.Namespace, name: str, source: Path, target: Path
) -> Iterator[Cell]:
    """Yield the cells of a trainer's checkpoint: of its copy and of its conversion."""
    table = {
        f"cp -r and sync, {name}": copy_command(source, target),
        f"slipway, {name} to Hugging Face": our_command(
            source, target, args.processes, *_HUGGING_FACE
        ),
    }
    yield from measure_table(args, table, source, target)


def measure_table(
    args: argparse.Namespace, table: dict[str, list[str]], source: Path, target: Path
) -> Iterator[Cell]:
    """Yield the cells of every contender: times of `repeats` rounds in turn, then memory."""
    log = args.work_dir / "last.log"
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(args.repeats):
        for name, command in table.items():
            remove(target)
            times[name].append(run_command(command, log)[0])
    files = source.rglob("*") if source.is_dir() else [source]
    size_mb = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    for name, command in table.items():
        remove(target)
        peak_bytes = run_command(command, log, sampled=True)[1]
        row, median = f"{name}, {size_mb / 1e3:.2f} GB", statistics.median(times[name])
        yield row, "median", f"{median:.2f} s"
        yield row, "slowest", f"{max(times[name]):.2f} s"
        yield row, "rate", f"{size_mb / median:.0f} MB/s"
        yield row, "peak memory", f"{peak_bytes / 1e6:.0f} MB"
    remove(target)


_NUMBER = {"type": int, "default": 2}
OPTIONS: Options = {
    "work_dir": {"help": "folder on the disk to measure"},
    "family": {"choices": ("gpt", "llama"), "default": "gpt", "help": "kind of model"},
    "size_gb": {"type": float, "nargs": "+", "default": [3.0], "help": "sizes in GB (1e9 bytes)"},
    "tp": {**_NUMBER, "help": "inference tensor-parallel size"},
    "processes": {**_NUMBER, "default": default_workers(), "help": "workers of this project"},
    "archive": {"type": Path, "help": "a trainer's checkpoint to convert to Hugging Face"},
    "peer_path": {"type": Path, "help": "checkout of FasterTransformer"},
    "peer_processes": {"type": int, "nargs": "+", "default": [1, 2]},
    "repeats": {"default": 3},
    "keep": {"action": "store_true", "help": "keep the generated checkpoints"},
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
