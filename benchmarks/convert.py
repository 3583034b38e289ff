"""Conversion speed and memory, against a durable plain copy and NVIDIA's converter.

    python -m benchmarks.convert --work-dir DIR [--peer-path FasterTransformer] [--repeats 3]
    python -m benchmarks.convert --work-dir DIR --memory-curve 0.1 1 3

A random fp16 GPT is written as a NeMo archive. Each round then times, as whole processes and in
turn, `cp` followed by `sync -f`, this project's converter (which syncs too), and the peer's (which
does not) at each requested number of worker processes. The source is in the page cache for all of
them. One more run of each measures memory, since that costs time.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from export_scripts.convert import usual_workers

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.01
COPY, OURS, PEER = "cp + sync", "slipway", "NVIDIA"
LEAVING, SHARDS_LEAVING = f"{OURS}, to Hugging Face", f"{OURS}, shards to Hugging Face"


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

    `anonymous` is the peak of private memory; `resident` also counts mapped file pages, each once
    (proportional set size).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.resident_bytes = 0
        self.anonymous_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until `done` is set."""
        while not self.done.wait(SAMPLE_S):
            resident = anonymous = 0
            for pid in _descendants(self.pid):
                facts = _rollup(pid)
                resident += facts.get("Pss", 0)
                anonymous += facts.get("Pss_Anon", 0) + facts.get("Pss_Shmem", 0)
            self.resident_bytes = max(self.resident_bytes, resident)
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        children = Path(f"/proc/{parent}/task")
        try:
            for task in children.iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


@dataclass
class Result:
    """The measurements of one contender."""

    seconds: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    anonymous_bytes: int = 0

    @property
    def median_s(self) -> float:
        """Median time of a run."""
        return statistics.median(self.seconds)


def run(command: list[str], log: Path, *, memory: Result | None = None) -> float:
    """Run a command to its end and return its wall time in seconds.

    Args:
        command: The command.
        log: File for its output.
        memory: Receives its peak memory; sampling slows the process down.

    Raises:
        RuntimeError: The command failed; its last lines are shown.
    """
    with log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        watch = PeakMemory(process.pid)
        if memory is not None:
            watch.start()
        status = process.wait()
        seconds = time.perf_counter() - start
    if memory is not None:
        watch.done.set()
        watch.join()
        memory.resident_bytes = max(memory.resident_bytes, watch.resident_bytes)
        memory.anonymous_bytes = max(memory.anonymous_bytes, watch.anonymous_bytes)
    if status:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} exited with {status}:\n{tail}")
    return seconds


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
        COPY: copy_command(source, target),
        f"{OURS}, {workers} workers": our_command(source, target, workers, *shards),
        LEAVING: our_command(source, target, workers, *huggingface),
        SHARDS_LEAVING: our_command(folder / f"{args.tp}-gpu", target, workers, *huggingface),
    }
    if not folder.exists():
        subprocess.run(our_command(source, folder, workers, *shards), cwd=ROOT, check=True)
    if args.peer_path:
        for processes in args.peer_processes:
            table[f"{PEER}, {processes} workers"] = peer_command(
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


def measure(args: argparse.Namespace, size_gb: float) -> dict[str, Result]:
    """Measure every contender on one checkpoint: `repeats` rounds in turn, then their memory."""
    source = args.work_dir / f"gpt_{size_gb:g}gb.nemo"
    if not source.exists():
        write_checkpoint(source, shape_for(size_gb), args.training_tp)
    target, log = args.work_dir / "output", args.work_dir / "last.log"
    table = commands(args, source, target)
    results = {name: Result() for name in table}
    for number in range(args.repeats):
        for name, command in table.items():
            remove(target)
            results[name].seconds.append(run(command, log))
            print(f"round {number + 1}: {name}: {results[name].seconds[-1]:.2f} s", file=sys.stderr)
    for name, command in table.items():
        remove(target)
        run(command, log, memory=results[name])
    remove(target)
    report(source, results)
    if not args.keep:
        remove(source)
        remove(args.work_dir / "shards")
    return results


def report(source: Path, results: dict[str, Result]) -> None:
    """Print the table of one checkpoint, and its ratios."""
    size_bytes = source.stat().st_size
    print(f"\n{source.name}: {size_bytes / 1e9:.2f} GB, fp16, whole processes, source cached")
    print("| | median s | min..max s | MB/s | peak memory MB | of it anonymous MB |")
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {result.median_s:.2f} | {min(result.seconds):.2f}.."
            f"{max(result.seconds):.2f} | {size_bytes / 1e6 / result.median_s:.0f} "
            f"| {result.resident_bytes / 1e6:.0f} | {result.anonymous_bytes / 1e6:.0f} |"
        )
    for name, result in results.items():
        if name.startswith(OURS):
            share = results[COPY].median_s / result.median_s
            print(f"\n{name} works at {share:.0%} of the speed of {COPY}")
    if any(name.startswith(PEER) for name in results):
        peer = _fastest(results, PEER)
        ours = next(each.median_s for name, each in results.items() if name.startswith(OURS))
        print(f"slipway is {peer / ours:.1f} times as fast as the peer in its better setting")


def _fastest(results: dict[str, Result], contender: str) -> float:
    """Return the least median time of a contender's settings."""
    return min(result.median_s for name, result in results.items() if name.startswith(contender))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work-dir", type=Path, required=True, help="folder on the disk to measure"
    )
    parser.add_argument("--size-gb", type=float, default=3.0, help="bytes of the checkpoint / 1e9")
    parser.add_argument("--memory-curve", type=float, nargs="+", help="several sizes instead")
    parser.add_argument("--training-tp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2, help="inference tensor-parallel size")
    parser.add_argument(
        "--processes", type=int, default=usual_workers(), help="workers of this project"
    )
    parser.add_argument("--peer-path", type=Path, help="checkout of FasterTransformer")
    parser.add_argument("--peer-processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every run there")
    parser.add_argument("--keep", action="store_true", help="keep the generated checkpoints")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    results = {str(gb): measure(args, gb) for gb in args.memory_curve or [args.size_gb]}
    if args.json:
        plain = {
            size: {name: dataclasses.asdict(result) for name, result in table.items()}
            for size, table in results.items()
        }
        args.json.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
