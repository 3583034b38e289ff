"""The options of an evaluation, as plain data; importing this costs nothing.

The configuration group `evaluate` has these fields; checks.py finds their problems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference.gateway.credentials import PLAIN, Credentials

REFERENCES = ("none", "huggingface")  # or a file
TRACKERS = ("mlflow", "tensorboard")  # packages, and extras of this one
LAMBADA_METRICS = ("lambada_last_word", "lambada_last_token", "lambada_perplexity")
# OpenAI's preprocessing of the LAMBADA test set (CC BY 4.0): 5,153 lines {"text": ...}.
LAMBADA_URL = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"
LAMBADA_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"


@dataclass(frozen=True)
class LambadaOptions:
    """Data and metrics of the task `lambada`.

    Attributes:
        data_path: JSON Lines with one `text` a line; null: `<data_dir>/lambada_test.jsonl`,
            downloaded from `url` when it is missing.
        sha256: checksum the downloaded file must have.
        metrics: which of LAMBADA_METRICS to measure; the perplexity doubles the requests.
        reference_path: figures recorded elsewhere for the same passages, to compare with.
    """

    data_path: Path | None = None
    url: str = LAMBADA_URL
    sha256: str = LAMBADA_SHA256
    metrics: tuple[str, ...] = LAMBADA_METRICS
    reference_path: Path | None = None


@dataclass(frozen=True)
class PromptOptions:
    """Virtual tokens ahead of every prompt, for models tuned by p-tuning or prompt tuning.

    Attributes:
        length: virtual tokens; 0 for models that are not tuned so.
        start_id: id of the first of them, `prompt_learning_start_id` of config.ini.
        task_id: table loaded by the server; null where the request brings its own.
        table_path: `model.prompt_table.<task>.weight.bin` to send with every request, fp32.
        append_ids: tokens after every prompt, such as a separator the model was tuned with.
    """

    length: int = 0
    start_id: int = 0
    task_id: int | None = None
    table_path: Path | None = None
    append_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextTaskOptions:
    """Data and prompts of a task whose answer is text.

    Attributes:
        data_path: JSON Lines (squad: also the official JSON) with the fields of the template.
        target_path: translation only: the file of right lines, where data_path has the sources.
        template: prompt with the row's fields in braces; null takes the task's own.
        output_len: tokens to generate; null takes the task's own.
        method: `generation`, or for tasks with few answers `log_likelihood`.
        reference_path: figures recorded elsewhere for the same data, to compare with.
    """

    data_path: Path | None = None
    target_path: Path | None = None
    template: str | None = None
    output_len: int | None = None
    method: str = "generation"
    prompt: PromptOptions = field(default_factory=PromptOptions)
    reference_path: Path | None = None


@dataclass(frozen=True)
class IdentityOptions:
    """Rows and tolerance of the task `identity`.

    Attributes:
        samples: rows of random token ids.
        input_len: tokens of the longest; a model of fewer positions gets shorter ones.
        output_len: tokens of an answer.
        tolerance: largest relative difference; null takes that of the coarsest of `types`.
        types: what weights are stored and computed in.
    """

    samples: int = 8
    input_len: int = 32
    output_len: int = 8
    tolerance: float | None = None
    types: tuple[str, ...] = ("fp32",)


@dataclass(frozen=True)
class LatencyOptions:
    """A measurement of latency and throughput, one point per shape, batch size and concurrency.

    Attributes:
        shapes: tokens in and out, such as `60+20`, or names in USE_CASES.
        batch_sizes: rows of a request.
        concurrencies: requests in flight at once.
        requests: timed requests of a point, after `warmup` that are not counted.
        max_point_s: a point ends after this many seconds, with the requests done by then.
        load_generator: `client` (ours) or `perf_analyzer` (NVIDIA's, which does not end early).
    """

    enabled: bool = True
    shapes: tuple[str, ...] = ("32+8", "32+32")
    batch_sizes: tuple[int, ...] = (1,)
    concurrencies: tuple[int, ...] = (1, 4)
    requests: int = 16
    warmup: int = 2
    max_point_s: float = 3.0
    load_generator: str = "client"


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of its answer."""

    input_len: int
    output_len: int


# The use cases that NVIDIA's deployment guide measures with.
USE_CASES = {
    "question_answering": Shape(60, 20),
    "intent_classification": Shape(225, 20),
    "translation": Shape(200, 200),
}


def parse_shape(text: str) -> Shape:
    """Return the shape that `text` writes or names.

    Raises:
        ValueError: it is neither a known name nor two positive numbers around a plus.
    """
    if text in USE_CASES:
        return USE_CASES[text]
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if found is None:
        raise ValueError(
            f"evaluate.latency.shapes has {text!r}; write tokens in and out such as 60+20, or one "
            f"of {', '.join(USE_CASES)}."
        )
    return Shape(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Bound:
    """Limits of one metric; those that are null are not applied.

    Attributes:
        min, max: absolute limits, in the metric's unit; equality passes.
        margin: how much worse than the baseline the value may be, in the metric's unit.
        sigmas: further room in standard errors of the difference between the two runs; with
            `margin` null a value other than null here compares with the baseline too.
    """

    min: float | None = None
    max: float | None = None
    margin: float | None = None
    sigmas: float | None = None

    @property
    def is_relative(self) -> bool:
        """Whether a baseline is needed to apply this bound."""
        return self.margin is not None or self.sigmas is not None


@dataclass(frozen=True)
class EvaluationOptions:
    """Everything `evaluate` needs to know besides the address of the server.

    Attributes:
        output_dir: where the report goes; files of an earlier report there are replaced.
        data_dir: where downloaded data sets are kept.
        tasks: names in the table of tasks, run in this order.
        url: host and port of the server; `protocol` is grpc or http.
        credentials: TLS and the token of requests.
        model_name, ensemble_name: Triton models for token ids and for text; without an ensemble
            (null) text is encoded and decoded here and the model is asked.
        tokenizer_dir: folder with the served tokenizer's files; null asks the server's own
            preprocessing and postprocessing models, at the price of more requests.
        weights_dir: the served folder of shards; family and hash of the weights are added to the
            report from its manifest.
        concurrency: requests kept in flight.
        limit: ask only this many samples, drawn with `seed`; null asks all, in file order.
        request_timeout_s: a request that takes longer has failed.
        text_tasks: options of the tasks whose answer is text, by name.
        reference: `huggingface` runs every task on `source_path` too, with the library that made
            it, and compares; `none` compares with the recorded references only; a file (a past
            report.json, or recorded figures) takes their place.
        source_path: the checkpoint that was converted.
        gate: bounds per metric name; a breach is reported and decides the exit code.
        baseline: `none`, `compare` (gate against `baseline_path`) or `update` (record it).
        history_dir: run store that the report is added to; null keeps no history.
        trackers: names in TRACKERS that get the report too.
    """

    output_dir: Path
    data_dir: Path
    tasks: tuple[str, ...] = ("lambada",)
    url: str = "127.0.0.1:8001"
    protocol: str = "grpc"
    credentials: Credentials = PLAIN
    model_name: str = "fastertransformer"
    ensemble_name: str | None = "ensemble"
    tokenizer_dir: Path | None = None
    weights_dir: Path | None = None
    concurrency: int = 32
    limit: int | None = None
    seed: int = 1234
    request_timeout_s: float = 120.0
    lambada: LambadaOptions = field(default_factory=LambadaOptions)
    text_tasks: Mapping[str, TextTaskOptions] = field(default_factory=dict)
    identity: IdentityOptions = field(default_factory=IdentityOptions)
    latency: LatencyOptions = field(default_factory=LatencyOptions)
    reference: str = "none"
    source_path: Path | None = None
    gate: Mapping[str, Bound] = field(default_factory=dict)
    baseline: str = "none"
    baseline_path: Path | None = None
    history_dir: Path | None = None
    trackers: tuple[str, ...] = ()

    def reference_path(self, task: str) -> Path | None:
        """Return the figures that `task` is compared with, if there are any."""
        if self.reference not in REFERENCES:
            return Path(self.reference)
        if task == "lambada":
            return self.lambada.reference_path
        return self.text_tasks.get(task, TextTaskOptions()).reference_path
