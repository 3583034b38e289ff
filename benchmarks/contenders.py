"""Contenders of the benchmarks: our engine, transformers and CTranslate2, and their limit.

Decoding is bound by the bytes that a step reads over the bandwidth of the memory.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import torch

from benchmarks.models import Model
from benchmarks.program import Cell, own_process, percentile
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.ft.config_ini import read_config
from export_scripts.numeric.dtypes import torch_dtype
from inference.ranks.device import compute_dtype, matrix_dtype

# A pause before each program: OpenMP's threads spin after their work, Intel's (CTranslate2's) for
# 0.2 s, and would slow down the next program.
_SETTLE_S = 0.5
_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}  # of a reading of memory
_ROUNDS = 7

Prompts = Sequence[Sequence[int]]
# (sequences, cached tokens of each) -> bytes that a step reads
StepBytes = Callable[[int, int], int]


@dataclass
class Program:
    """One program that generates; `step_times` receives the seconds between tokens."""

    name: str
    generate: Callable[[Prompts, int], object]
    step_times: list[float] = field(default_factory=list)
    close: Callable[[], None] = lambda: None
    step_bytes: StepBytes | None = None


class Contender:
    """A program in a process of its own, and its measurements.

    In one process each program would have its own threads, and with more threads than processors
    OpenMP lets them sleep at each wait: every program would take up to twice as long.
    """

    def __init__(self, make: Callable[[], Program], *, threads: int) -> None:
        """Start the process; `make` travels there."""
        self._pool = own_process(_begin, make, threads)
        self.name, self.step_bytes = self._pool.submit(_described).result()
        self.seconds: list[float] = []
        self.step_times: list[float] = []

    def generate(self, prompts: Prompts, output_len: int) -> None:
        """Generate once and note the times."""
        seconds, step_times = self._pool.submit(_generate, prompts, output_len).result()
        self.seconds.append(seconds)
        self.step_times += step_times

    def close(self) -> None:
        """End the process."""
        self._pool.submit(_end).result()
        self._pool.shutdown()


_program: Program  # of a process that a Contender started


def _begin(make: Callable[[], Program], threads: int) -> None:
    global _program
    torch.set_num_threads(threads)
    _program = make()


def _described() -> tuple[str, StepBytes | None]:
    return _program.name, _program.step_bytes


def _generate(prompts: Prompts, output_len: int) -> tuple[float, list[float]]:
    _program.step_times.clear()
    start = time.perf_counter()
    _program.generate(prompts, output_len)
    return time.perf_counter() - start, _program.step_times


def _end() -> None:
    _program.close()


class StepClock:
    """Records the time between calls."""

    def __init__(self, into: list[float]) -> None:
        self._into = into
        self._last: float | None = None

    def __call__(self, *_: object) -> None:
        """Note one generated token."""
        now = time.perf_counter()
        if self._last is not None:
            self._into.append(now - self._last)
        self._last = now


def measure_rounds(
    table: Sequence[Contender], prompts: Prompts, output_len: int, repeats: int
) -> None:
    """Time every contender in turn, after one round that is not counted."""
    for each in table:
        each.generate(prompts, output_len)
        each.seconds.clear()
        each.step_times.clear()
    for _ in range(repeats):
        for each in table:
            time.sleep(_SETTLE_S)
            each.generate(prompts, output_len)


@contextlib.contextmanager
def contenders(
    makers: Sequence[Callable[[], Program]], threads: int
) -> Iterator[Sequence[Contender]]:
    """Start every program, and end them all."""
    torch.set_num_threads(threads)
    table = [Contender(make, threads=threads) for make in makers]
    yield table
    for each in table:
        each.close()


def cells(table: Sequence[Contender], title: str, tokens: int) -> Iterator[Cell]:
    """Yield what was measured, as rows of `title`; a round has `tokens` tokens."""
    for each in table:
        yield title, each.name, f"{tokens / statistics.median(each.seconds):.1f} tokens/s"
        yield f"{title}, slowest", each.name, f"{tokens / max(each.seconds):.1f} tokens/s"
        if len(each.step_times) > 1:
            for percent in (50, 99):
                step = percentile(each.step_times, percent)
                yield f"{title}, a step p{percent}", each.name, f"{step * 1e3:.2f} ms"


def measured_bandwidth(device: str) -> float:
    """Return bytes/s of the best of some readings of memory, by as many threads as torch uses."""
    values = torch.ones(_BYTES[device] // 4, device=device)

    def read() -> None:
        # The fastest of torch's reductions.
        if device == "cpu":
            torch.dot(values, values)
        else:
            values.sum()
            torch.cuda.synchronize()

    read()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / min(seconds)


def step_bytes(
    ft_dir: Path, data_type: str, device: str, int8: bool, batch: int, length: int
) -> int:
    """Return the bytes of weights, keys and values that one decoding step reads.

    Args:
        ft_dir: A decoder-only model.
        data_type: Type of computation.
        device: cpu or cuda.
        int8: Whether matrices are kept in 8 bits.
        batch: Sequences.
        length: Cached tokens of each.
    """
    family, config = read_config(ft_dir)
    architecture = config.architecture()
    assert isinstance(architecture, DecoderArchitecture)
    computed = compute_dtype(data_type, torch.device(device))
    kept = matrix_dtype(data_type, config.weight_data_type, torch.device(device)) or computed
    matrix_bytes = 1 if int8 else kept.itemsize
    # Of the embedding one row is read per token, unless it is the head as well.
    unread = {"model.wpe", "model.wte" if architecture.untied_head else ""}
    weights = 0
    for tensor in family.tensors(config):
        if tensor.name in unread:
            continue
        is_matrix = len(tensor.shape) > 1
        weights += prod(tensor.shape) * (matrix_bytes if is_matrix else computed.itemsize)
    head_bytes = architecture.kv_head_num * architecture.size_per_head * computed.itemsize
    return weights + batch * length * 2 * architecture.num_layer * head_bytes


def slipway(
    ft_dir: Path,
    data_type: str,
    device: str,
    *,
    slots: int,
    max_len: int,
    int8: bool = False,
) -> Program:
    """Return this project's engine on one rank, with room for `slots` times `max_len` tokens."""
    from inference.decoding.options import RowOptions
    from inference.decoding.request import GenerationRequest, RowRequest
    from inference.engine.engine import Engine, EngineOptions, Placement

    options = EngineOptions(max_lanes=slots, max_seq_len=max_len)
    engine = Engine(
        ft_dir, Placement(data_type=data_type, int8_mode=int(int8), device=device), options=options
    )
    engine.start()
    step_times: list[float] = []

    def generate(prompts: Prompts, tokens: int) -> None:
        never = engine.limits.vocab_size + 1
        rows = tuple(
            RowRequest(
                input_ids=tuple(ids),
                output_len=tokens,
                options=RowOptions(start_id=0, end_id=never),
                context_ids=tuple(ids),
            )
            for ids in prompts
        )
        request = GenerationRequest(rows=rows, padded_len=max(map(len, prompts)))
        engine.submit(request, on_step=StepClock(step_times)).result()

    name = f"slipway {'int8' if int8 else data_type}"
    read = partial(step_bytes, ft_dir, data_type, device, int8)
    return Program(name, generate, step_times, close=engine.stop, step_bytes=read)


def hugging_face(model: Model, data_type: str, device: str) -> Program:
    """Return transformers' own generate."""
    import transformers

    model_class, dtype = transformers.AutoModelForCausalLM, torch_dtype(data_type)
    if model.checkpoint is not None:
        theirs = model_class.from_pretrained(model.checkpoint, dtype=dtype).to(device)
    else:
        with torch.device(device):
            theirs = model_class.from_config(model.config, dtype=dtype)
    theirs.eval()
    step_times: list[float] = []

    def generate(prompts: Prompts, tokens: int) -> None:
        ids = torch.tensor(prompts, device=device)
        clock = StepClock(step_times)

        def noted(_: object, scores: object) -> object:
            clock()
            return scores

        with torch.inference_mode():
            theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                logits_processor=transformers.LogitsProcessorList([noted]),
            )

    return Program(f"transformers {transformers.__version__} {data_type}", generate, step_times)


def ctranslate(folder: Path, work_dir: Path, data_type: str, threads: int) -> Program:
    """Return CTranslate2's generator on CPU."""
    import ctranslate2
    import tokenizers
    import transformers

    # The converter asks for the vocabulary of a tokenizer; random weights have none.
    size = transformers.AutoConfig.from_pretrained(folder).vocab_size
    words = {f"t{i}": i for i in range(size)}
    words["<|endoftext|>"] = words.pop("t0")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    ).save_pretrained(folder)
    kind = {"fp32": "float32", "int8": "int8"}[data_type]
    target = work_dir / f"ctranslate2_{kind}"
    if not target.exists():
        converter = ctranslate2.converters.TransformersConverter(str(folder))
        converter.convert(str(target), quantization=kind)
    generator = ctranslate2.Generator(
        str(target), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1
    )

    def generate(prompts: Prompts, tokens: int) -> None:
        texts = [[f"t{i}" for i in ids] for ids in prompts]
        generator.generate_batch(
            texts,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )

    return Program(f"CTranslate2 {ctranslate2.__version__} {data_type}", generate)
