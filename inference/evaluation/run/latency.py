"""Latency and throughput of the running server, over shapes, batch sizes and concurrencies.

Every point is a closed loop: `concurrency` requests are in flight, and each answer triggers the
next request. Prompts are windows of the tasks' tokens, so that the ids fit any vocabulary. Tokens
of a streaming model are timed on arrival. For other models, the time to the first token is that of
a request for one token, and the rest of the median latency is divided evenly among the further
tokens. For an encoder, input tokens are counted: its requests return hidden states.
"""

# Shapes: B rows, S tokens, H hidden width

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice, product
from statistics import median

import numpy as np

from inference.evaluation.options import EvaluationOptions, RequestShape, parse_shape
from inference.evaluation.record import LatencyPoint
from inference.evaluation.retry import no_retries_after_interrupt, with_retries
from inference.evaluation.run.task_run import ProgressCallback, no_progress
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import (
    EvaluationError,
    Ids,
    RequestFailedError,
    RequestTensors,
    Tally,
    TextGenerator,
    TokenIds,
    generates,
)
from inference.evaluation.tasks.served_folder import served_architecture

_MAX_PROMPTS = 64


@dataclass(frozen=True)
class Load:
    """The requests of one point; `prompts` all have `shape.input_len` tokens."""

    prompts: tuple[TokenIds, ...]
    shape: RequestShape
    batch_size: int
    concurrency: int

    def __str__(self) -> str:
        return (
            f"{self.shape.input_len} + {self.shape.output_len} tokens, batch {self.batch_size}, "
            f"concurrency {self.concurrency}"
        )


@dataclass(frozen=True)
class Answered:
    """The answers to a load.

    Attributes:
        durations_s: of each request, until its last answer.
        generated: tokens of all answers.
        seconds: from the first request to the last answer.
        arrivals_s: for a streaming model, the arrival of each token of each request.
    """

    durations_s: Sequence[float]
    generated: int
    seconds: float
    arrivals_s: Sequence[Sequence[float]] = ()


def measure_latency(
    model: TextGenerator,
    tokens: Iterable[Ids],
    options: EvaluationOptions,
    *,
    progress: ProgressCallback = no_progress,
) -> tuple[LatencyPoint, ...]:
    """Measure every point of the options, with prompts cut from `tokens`.

    Raises:
        EvaluationError: a request failed.
    """
    latency = options.latency
    shapes = list(dict.fromkeys(parse_shape(text) for text in latency.shapes))
    if not generates(model):
        shapes = list(dict.fromkeys(RequestShape(shape.input_len, 0) for shape in shapes))
    most = max(shape.input_len for shape in shapes) * _MAX_PROMPTS
    ids = list(islice(chain.from_iterable(tokens), most))
    loads = [
        Load(cut_prompts(ids, input_len=shape.input_len), shape, *load)
        for shape, *load in product(shapes, latency.batch_sizes, latency.concurrencies)
    ]
    send = cache(lambda load: _send(model, options, load))
    points = []
    for done, load in enumerate(loads):
        progress("latency", done, len(loads))
        needs_one = load.shape.output_len and not model.streams
        one = replace(load, shape=RequestShape(load.shape.input_len, 1)) if needs_one else load
        try:
            points.append(_point(load, send(one), send(load)))
        except RequestFailedError as error:
            raise EvaluationError(
                f"latency of {load} could not be measured: {error}\nCheck that the model allows "
                "so many positions and rows (evaluate.latency.shapes and batch_sizes)."
            ) from error
    progress("latency", len(loads), len(loads))
    return tuple(points)


def _point(load: Load, one: Answered, answered: Answered) -> LatencyPoint:
    """Return a point; `one` are answers of one token, which give the time to the first token."""
    latency, generates_tokens = distribution(answered.durations_s), load.shape.output_len > 0
    requests, arrivals_s = len(answered.durations_s), answered.arrivals_s
    first_s, per_token_ms = one.durations_s, None
    if arrivals_s:
        first_s = [times[0] for times in arrivals_s]
        several = [times for times in arrivals_s if len(times) > 1]
        steps_ms = [1000 * (times[-1] - times[0]) / (len(times) - 1) for times in several]
        per_token_ms = median(steps_ms) if steps_ms else None
    elif generates_tokens:
        further = answered.generated / (requests * load.batch_size) - 1
        rest_ms = latency.p50_ms - distribution(first_s).p50_ms
        per_token_ms = rest_ms / further if further > 0 and rest_ms > 0 else None
    first_token = distribution(first_s)
    counted = answered.generated
    if not generates_tokens:
        counted = requests * load.batch_size * load.shape.input_len
    return LatencyPoint(
        batch_size=load.batch_size,
        input_len=load.shape.input_len,
        output_len=load.shape.output_len,
        concurrency=load.concurrency,
        requests=requests,
        generated=answered.generated,
        latency=latency,
        tokens_per_s=counted / answered.seconds,
        first_token_ms=first_token.p50_ms if generates_tokens else None,
        first_token_p95_ms=first_token.p95_ms if generates_tokens else None,
        per_token_ms=per_token_ms,
        streamed=bool(arrivals_s),
    )


def cut_prompts(ids: Ids, *, input_len: int) -> tuple[TokenIds, ...]:
    """Return prompts of exactly `input_len` tokens, cut from `ids` at different places.

    Raises:
        ValueError: there are no tokens.
    """
    if not ids:
        raise ValueError("latency needs some text to cut prompts from")
    ids = [*ids] * -(-input_len // len(ids))
    last = len(ids) - input_len
    stride = max(1, min(input_len, last // (_MAX_PROMPTS - 1)))
    return tuple(tuple(ids[start : start + input_len]) for start in range(0, last + 1, stride))


def _send(model: TextGenerator, options: EvaluationOptions, load: Load) -> Answered:
    """Send the warm-up, then requests until enough are answered or the time is up."""
    send, latency = _sender(model, options, load), options.latency
    for number in range(latency.warmup):
        send(number)
    numbers = iter(range(latency.requests))  # shared by the workers
    answered = []
    start = time.perf_counter()

    def work() -> None:
        for number in numbers:
            if number and time.perf_counter() - start > latency.max_point_s:
                return
            answered.append(send(number))

    with (
        no_retries_after_interrupt(),
        ThreadPoolExecutor(load.concurrency, thread_name_prefix="latency") as pool,
    ):
        workers = [pool.submit(work) for _ in range(load.concurrency)]
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.result()  # raises the error of a failed request
    return Answered(
        [duration for duration, _, _ in answered],
        sum(generated for _, generated, _ in answered),
        seconds,
        [arrivals_s for _, _, arrivals_s in answered if arrivals_s],
    )


def _sender(
    model: TextGenerator, options: EvaluationOptions, load: Load
) -> Callable[[int], tuple[float, int, list[float]]]:
    """Return a function that sends a load's request of some number.

    It returns the duration of the answered attempt, the number of tokens, and their arrivals (s).
    """
    rows, prompts, output_len = load.batch_size, load.prompts, load.shape.output_len

    def once(batch: Sequence[Ids]) -> tuple[float, int, list[float]]:
        arrivals_s = []
        answers: Sequence[Ids] = ()
        encoded = {} if output_len else encoder_request(batch, model.input_names(), options)
        begin = time.perf_counter()
        if output_len:
            answers = model.complete_rows(
                batch,
                output_len=output_len,
                each_frame=lambda: arrivals_s.append(time.perf_counter() - begin),
            )
        else:
            model.infer(encoded, ("output_hidden_state",))
        return time.perf_counter() - begin, sum(map(len, answers)), arrivals_s

    tally = getattr(model, "tally", None) or Tally()

    def send(number: int) -> tuple[float, int, list[float]]:
        batch = [prompts[(number * rows + row) % len(prompts)] for row in range(rows)]
        return with_retries(lambda: once(batch), within_s=options.retry_s, tally=tally)

    return send


def encoder_request(
    rows: Sequence[Ids], names: Collection[str], options: EvaluationOptions
) -> RequestTensors:
    """Return a request to an encoder for rows of equal length.

    An encoder that takes embeddings (B, S, H) gets random ones: its time does not depend on them.

    Raises:
        EvaluationError: it takes embeddings of unknown width.
    """
    lengths = [[len(row)] for row in rows]
    if "input_hidden_state" not in names:
        return {"input_ids": list(rows), "sequence_length": lengths}
    architecture = served_architecture(options)
    if architecture is None:
        raise EvaluationError(
            "the latency of this encoder needs its hidden size, which is read from the served "
            "folder or the source checkpoint; set export.model.checkpoint_path, or "
            "evaluate.latency.enabled=false."
        )
    shape = (len(rows), len(rows[0]), architecture.hidden)
    states = np.random.default_rng(0).standard_normal(shape)
    return {"input_hidden_state": states.astype(np.float32), "sequence_lengths": lengths}
