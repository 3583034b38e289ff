"""Conversion speed and memory, against a durable plain copy and NVIDIA's converter.

    python -m benchmarks.convert --work-dir DIR [--peer-path FasterTransformer] [--repeats 3]
    python -m benchmarks.convert --work-dir DIR --size-gb 0.1 1 3

A random fp16 GPT is written as a NeMo archive. Each round then times, as whole processes and in
turn, `cp` followed by `sync -f`, this project's converter (which syncs too), and the peer's (which
does not) at each requested number of worker processes. The source is in the page cache for all of
them. One more run of each measures memory, since that costs time.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from benchmarks.program import ROOT, Cell, run
from export_scripts.convert import usual_workers
from inference.server.supervisor import descendants

_SAMPLE_S = 0.01


@dataclass(frozen=True)
class Shape:
    """Sizes of the synthetic model."""

    hidden: int
    num_layer: int
    head_num: int
    vocab_size: int = 51200
    max_positions: int = 2048

    @property
    def parameters(self) -> int:
        """Number of values, layernorms and biases left out."""
        h = self.hidden
        return 12 * self.num_layer * h * h + (self.vocab_size + self.max_positions) * h


def shape_for(size_gb: float) -> Shape:
    """Return a GPT of about `size_gb` 10^9 bytes in fp16."""
    hidden = 2048 if size_gb >= 1 else 512
    fixed = Shape(hidden, 0, hidden // 64).parameters
    layers = max(2, round((size_gb * 1e9 / 2 - fixed) / (12 * hidden * hidden)))
    return Shape(hidden, layers + layers % 2, hidden // 64)


def layer_tensors(shape: Shape, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of one layer on one training rank."""
    h, f = shape.hidden, 4 * shape.hidden
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", (h,)
        yield f"{norm}.bias", (h,)
    yield "self_attention.query_key_value.weight", (3 * h // tp, h)
    yield "self_attention.query_key_value.bias", (3 * h // tp,)
    yield "self_attention.dense.weight", (h, h // tp)
    yield "self_attention.dense.bias", (h,)
    yield "mlp.dense_h_to_4h.weight", (f // tp, h)
    yield "mlp.dense_h_to_4h.bias", (f // tp,)
    yield "mlp.dense_4h_to_h.weight", (h, f // tp)
    yield "mlp.dense_4h_to_h.bias", (h,)


def write_checkpoint(path: Path, shape: Shape, tp: int) -> None:
    """Write a NeMo archive of random fp16 weights for `tp` training ranks."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).mul_(0.02).half()

    config = {
        "num_layers": shape.num_layer,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": 4 * shape.hidden,
        "num_attention_heads": shape.head_num,
        "max_position_embeddings": shape.max_positions,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "layernorm_epsilon": 1e-5,
        "tokenizer": dict.fromkeys(("library", "type", "model", "vocab_file", "merge_file")),
    }
    prefix = "model.language_model."
    with tarfile.open(path, "w") as archive:
        _add_bytes(archive, "./model_config.yaml", yaml.safe_dump(config).encode())
        for rank in range(tp):
            state = {
                f"{prefix}embedding.word_embeddings.weight": random(
                    shape.vocab_size // tp, shape.hidden
                ),
                f"{prefix}embedding.position_embeddings.weight": random(
                    shape.max_positions, shape.hidden
                ),
                f"{prefix}encoder.final_layernorm.weight": random(shape.hidden),
                f"{prefix}encoder.final_layernorm.bias": random(shape.hidden),
            }
            for layer in range(shape.num_layer):
                for name, size in layer_tensors(shape, tp):
                    state[f"{prefix}encoder.layers.{layer}.{name}"] = random(*size)
            weights = path.with_suffix(f".{rank}.ckpt")
            torch.save(state, weights)
            member = (
                f"./mp_rank_{rank:02d}/model_weights.ckpt" if tp > 1 else "./model_weights.ckpt"
            )
            archive.add(weights, member)
            weights.unlink()


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


class PeakMemory(threading.Thread):
    """Samples the memory of a process and its descendants until it ends.

    `peak_bytes` counts mapped file pages too, each once (proportional set size).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until `done` is set."""
        while not self.done.wait(_SAMPLE_S):
            pids = [self.pid, *descendants(self.pid)]
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident_bytes, pids)))


def _resident_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def run_command(command: list[str], log: Path, *, sampled: bool = False) -> tuple[float, int]:
    """Run a command to its end; return its seconds, and its peak memory in bytes if `sampled`.

    Sampling slows the process down.

    Raises:
        RuntimeError: The command failed; its last lines are shown.
    """
    with log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        memory = PeakMemory(process.pid)
        if sampled:
            memory.start()
        status = process.wait()
        seconds = time.perf_counter() - start
        memory.done.set()
    if status:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} exited with {status}:\n{tail}")
    return seconds, memory.peak_bytes


def copy_command(source: Path, target: Path) -> list[str]:
    """Return a durable plain copy."""
    return ["bash", "-c", 'cp "$0" "$1" && sync -f "$1"', str(source), str(target)]


def our_command(source: Path, target: Path, processes: int, *form: str) -> list[str]:
    """Return this project's conversion into a format."""
    return [
        *(sys.executable, "-m", "export_scripts.convert", *form),
        *("--checkpoint-path", str(source), "--output-dir", str(target)),
        *("--weight-data-type", "fp16", "--processes", str(processes)),
        # The synthetic checkpoint has no tokenizer to define them.
        *("--set", "start_id=0", "--set", "end_id=0"),
    ]


def peer_command(peer: Path, source: Path, target: Path, tp: int, processes: int) -> list[str]:
    """Return NVIDIA's conversion."""
    return [
        *(sys.executable, "-m", "benchmarks.peers.nemo_ckpt_convert", str(peer)),
        *("--in-file", str(source), "--saved-dir", str(target), "--infer-gpu-num", str(tp)),
        *("--weight-data-type", "fp16", "--processes", str(processes)),
    ]


def commands(args: argparse.Namespace, source: Path, target: Path) -> dict[str, list[str]]:
    """Return the command of each contender."""
    shards = ("--tensor-model-parallel-size", str(args.tp))
    huggingface = ("--output-format", "huggingface")
    folder, workers = args.work_dir / "shards", args.processes
    table = {
        "cp + sync": copy_command(source, target),
        f"slipway, {workers} workers": our_command(source, target, workers, *shards),
        "slipway, to Hugging Face": our_command(source, target, workers, *huggingface),
        "slipway, shards to Hugging Face": our_command(
            folder / f"{args.tp}-gpu", target, workers, *huggingface
        ),
    }
    if not folder.exists():
        subprocess.run(our_command(source, folder, workers, *shards), cwd=ROOT, check=True)
    if args.peer_path:
        for processes in args.peer_processes:
            table[f"NVIDIA, {processes} workers"] = peer_command(
                args.peer_path, source, target, args.tp, processes
            )
    return table


def remove(path: Path) -> None:
    """Remove a file or a folder, and let the disk settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    subprocess.run(["sync", "-f", str(path.parent)], check=True)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield what every contender does with each size of checkpoint."""
    for size_gb in args.size_gb:
        source = args.work_dir / f"gpt_{size_gb:g}gb.nemo"
        if not source.exists():
            write_checkpoint(source, shape_for(size_gb), args.training_tp)
        yield from measure_size(args, source)
        if not args.keep:
            remove(source)
            remove(args.work_dir / "shards")


def measure_size(args: argparse.Namespace, source: Path) -> Iterator[Cell]:
    """Yield every contender's figures: `repeats` rounds in turn, then their memory."""
    target, log = args.work_dir / "output", args.work_dir / "last.log"
    table = commands(args, source, target)
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(args.repeats):
        for name, command in table.items():
            remove(target)
            times[name].append(run_command(command, log)[0])
    size_mb = source.stat().st_size / 1e6
    for name, command in table.items():
        remove(target)
        peak_bytes = run_command(command, log, sampled=True)[1]
        row, median = f"{name}, {size_mb / 1e3:.2f} GB", statistics.median(times[name])
        yield row, "median", f"{median:.2f} s"
        yield row, "slowest", f"{max(times[name]):.2f} s"
        yield row, "rate", f"{size_mb / median:.0f} MB/s"
        yield row, "peak memory", f"{peak_bytes / 1e6:.0f} MB"
    remove(target)


def main() -> None:
    """Run the program."""
    number = {"type": int, "default": 2}
    run(
        measure,
        __doc__,
        work_dir={"help": "folder on the disk to measure"},
        size_gb={"type": float, "nargs": "+", "default": [3.0], "help": "bytes of each / 1e9"},
        training_tp=number,
        tp={**number, "help": "inference tensor-parallel size"},
        processes={**number, "default": usual_workers(), "help": "workers of this project"},
        peer_path={"type": Path, "help": "checkout of FasterTransformer"},
        peer_processes={"type": int, "nargs": "+", "default": [1, 2]},
        repeats={"default": 3},
        keep={"action": "store_true", "help": "keep the generated checkpoints"},
    )


if __name__ == "__main__":
    main()
