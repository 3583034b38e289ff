"""Latency by model size at batch 1, as a table and a figure, before any checkpoint exists.

    python -m benchmarks.model_sizes --work-dir DIR
    python -m benchmarks.model_sizes --work-dir DIR --tensor-para-size 4 --sizes 20b 40b

Each size is a GPT of NeMo's training configurations, synthesized with sparse files: matrices of
zeros take no space on disk and the same time as any others. By default those are measured whose
weights fit into half of the free memory. The figure, sizes.html, is written again after each size
and has a curve for each shape of tokens in and out; that of NVIDIA's guide is the default.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from markupsafe import Markup

from benchmarks.program import Cell, run
from export_scripts.families.gpt.layout import GPT
from export_scripts.families.layout.config import FTConfig
from export_scripts.numeric.dtypes import item_size
from export_scripts.synthesize import synthesize, synthetic_config
from inference.decoding.request import parse_request
from inference.engine.capacity import available_bytes
from inference.engine.engine import Engine, EngineOptions, Placement
from inference.evaluation.options import RequestShape, parse_shape
from inference.evaluation.report.formatting import milliseconds_text
from inference.evaluation.report.page import render_page
from inference.evaluation.report.svg import Frame, dot, legend, log_ticks, polyline, text

_END = 51199

# Layers, hidden width and heads: NeMo-Megatron-Launcher's conf/training/gpt3/*.yaml; 1.3b and 6.7b
# are those of the GPT-3 paper.
SIZES = {
    "126m": (12, 768, 12),
    "1.3b": (24, 2048, 16),
    "5b": (24, 4096, 32),
    "6.7b": (32, 4096, 32),
    "20b": (44, 6144, 48),
    "40b": (48, 8192, 64),
    "175b": (96, 12288, 96),
}


@dataclass(frozen=True)
class Measured:
    """The median latency of each shape in ms, and the parameters of a size."""

    name: str
    parameters: float
    latency_ms: Mapping[RequestShape, float]


def measure_size(name: str, args: argparse.Namespace) -> Measured:
    """Synthesize a model, ask for each shape and remove the model again."""
    config, folder = _config(name, args), args.work_dir / name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        ft_dir = synthesize(GPT, config, folder, sparse=True)
        placement = Placement(
            tp_size=args.tensor_para_size,
            pp_size=args.pipeline_para_size,
            data_type=args.data_type,
            device=args.device,
        )
        longest = max(each.input_len + each.output_len for each in args.shapes)
        options = EngineOptions(max_lanes=1, max_seq_len=longest)
        with Engine(ft_dir, placement, options=options) as engine:
            found = {each: _median_ms(engine, each, args) for each in args.shapes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Measured(name, _parameters(config), found)


def _config(name: str, args: argparse.Namespace) -> FTConfig:
    layers, hidden, heads = SIZES[name]
    return synthetic_config(
        GPT,
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=_END + 1,
        weight_data_type=args.weight_data_type,
        tensor_para_size=args.tensor_para_size,
    )


def _parameters(config: FTConfig) -> int:
    return sum(math.prod(tensor.shape) for tensor in GPT.tensors(config))


def fitting_sizes(args: argparse.Namespace) -> list[str]:
    """Return the sizes whose weights, as they are computed with, fit into half of free memory."""
    ranks = args.tensor_para_size * args.pipeline_para_size
    on_gpu = args.device == "cuda"
    free = torch.cuda.mem_get_info()[0] * ranks if on_gpu else available_bytes()
    item = item_size(args.data_type)
    return [name for name in SIZES if _parameters(_config(name, args)) * item <= free // 2]


def _median_ms(engine: Engine, shape: RequestShape, args: argparse.Namespace) -> float:
    """Return the median of `--repeats` requests, or of those that `--seconds` allow."""
    rows = np.random.default_rng(0).integers(0, _END, (1, shape.input_len), np.uint32)
    tensors = {
        "input_ids": rows,
        "input_lengths": np.array([[shape.input_len]], np.uint32),
        "request_output_len": np.array([[shape.output_len]], np.uint32),
        "end_id": np.array([[_END]], np.uint32),
    }
    request = parse_request(tensors, engine.limits)
    engine.generate(request)  # a warm-up
    durations: list[float] = []
    while len(durations) < args.repeats and sum(durations) < args.seconds:
        begin = time.perf_counter()
        engine.generate(request)
        durations.append(time.perf_counter() - begin)
    return 1000 * statistics.median(durations)


def chart(measured: Sequence[Measured], shapes: Sequence[RequestShape]) -> Markup:
    """Return latency (log) over parameters (log), a curve for each shape, as SVG."""
    frame = Frame(720, 360, top=52, left=64)
    every = [value for each in measured for value in each.latency_ms.values()]
    scale_y, body = frame.y_axis(
        log_ticks(min(every), max(every)), milliseconds_text, is_log=min(every) < max(every)
    )
    logs = [math.log10(each.parameters) for each in measured]
    scale_x = frame.x(min(logs) - 0.1, max(logs) + 0.1)
    for number, shape in enumerate(shapes):
        places = [
            (scale_x(at), scale_y(each.latency_ms[shape]))
            for at, each in zip(logs, measured, strict=True)
        ]
        body.append(polyline(places, kind=f"curve s{number}"))
        for place, each in zip(places, measured, strict=True):
            hint = f"{each.name}, {_name(shape)}: {milliseconds_text(each.latency_ms[shape])}"
            body.append(dot(place, 4, kind=f"point s{number}", hint=hint))
    for at, each in zip(logs, measured, strict=True):
        body.append(text((scale_x(at), frame.y_end + 18), each.name, anchor="middle"))
    body += legend(frame, [_name(shape) for shape in shapes])
    body += frame.axis_names(x="parameters", y="latency of a request, batch 1")
    return frame.svg(body, label="Latency by model size")


def _name(shape: RequestShape) -> str:
    return f"{shape.input_len} + {shape.output_len}"


def report(measured: Sequence[Measured], args: argparse.Namespace) -> str:
    """Return the page with the figure and its table."""
    where = (
        f"{args.device}, TP {args.tensor_para_size} x PP {args.pipeline_para_size}, "
        f"{args.weight_data_type} weights, computed in {args.data_type}"
    )
    return render_page(
        "page.html",
        title="Latency by model size",
        charts=[("Latency by model size", chart(measured, args.shapes))],
        head=("size", *map(_name, args.shapes)),
        rows=[(each.name, *map(milliseconds_text, each.latency_ms.values())) for each in measured],
        lead=where,
        footer="benchmarks.model_sizes",
    )


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield every size, smallest first, and write the figure again after each."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.data_type = args.data_type or ("fp16" if args.device == "cuda" else "fp32")
    measured: list[Measured] = []
    for name in sorted(args.sizes or fitting_sizes(args) or ["126m"], key=list(SIZES).index):
        measured.append(measure_size(name, args))
        text = report(measured, args)
        (args.work_dir / "sizes.html").write_text(text, encoding="utf-8")
        for shape, value in measured[-1].latency_ms.items():
            yield name, _name(shape), f"{value:.1f} ms"


if __name__ == "__main__":
    types, shapes = {"choices": ("fp32", "fp16", "bf16")}, {"type": parse_shape, "nargs": "+"}
    run(
        measure,
        __doc__,
        work_dir={},
        sizes={"nargs": "+", "choices": SIZES, "help": "default: those that memory has room for"},
        shapes={**shapes, "default": [RequestShape(60, 20)], "metavar": "IN+OUT"},
        tensor_para_size={"type": int, "default": 1},
        pipeline_para_size={"type": int, "default": 1},
        weight_data_type={**types, "default": "fp16"},
        data_type={"help": "default: fp16 on a GPU, else fp32"},
        device={"default": None, "help": "default: cuda where there is one"},
        repeats={"help": "requests of each shape at most"},
        seconds={"type": float, "default": 30.0, "help": "after which no request is sent"},
    )
