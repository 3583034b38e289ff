"""The options of an evaluation: one record for each section of the configuration.

These records are the schema of the group `evaluate`: each field states its key's meaning, range and
default, which `--help` prints and every check reads. The evaluator uses the same records.
"""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from foundations.files.json_content import Fields
from foundations.job_options import JobOptions
from foundations.values import INT32, SECONDS, TOKENS, Within, option
from inference.front.access import Credentials

OPENAI = "openai"  # the protocol
LAMBADA_METRICS = (
    "lambada_last_word",
    "lambada_last_token",
    "lambada_perplexity",
    "lambada_token_perplexity",
)
# Limits beyond which a number can only be a typing error.
_MAX_IN_FLIGHT = 65536
_MAX_SEQUENCE = 1 << 17  # tokens of a prompt and its answer: the longest context in wide use


@dataclass
class LambadaOptions:
    """`evaluate.lambada`: last-word prediction."""

    data_path: Path | None = option(
        "JSON Lines with `text`; null: <data_dir>/lambada_test.jsonl", None, is_path=True
    )
    metrics: list[str] = option("what to measure", [*LAMBADA_METRICS])


@dataclass
class PromptOptions:
    """`evaluate.<task>.prompt`: virtual tokens of a p-tuned model."""

    from_model: bool = option(
        "use the prompt table of config.ini with the task's name, or with task_id", True
    )
    task_id: int | None = option("number of the prompt table", None, within=(0, INT32))
    append_ids: list[Annotated[int, Within(0, INT32)]] = option("token ids after every prompt", [])


@dataclass
class TextTaskOptions:
    """`evaluate.<task>` of a task whose answer is text."""

    data_path: Path | None = option("the data", None, is_path=True)
    target_path: Path | None = option("translation: the reference lines", None, is_path=True)
    template: str | None = option("prompt with the data's fields in braces", None, has_lines=True)
    output_len: int | None = option("tokens to generate", None, within=(1, TOKENS))
    method: str = option(
        "how an answer is found", "generation", choices=("generation", "log_likelihood")
    )
    prompt: PromptOptions = field(default_factory=PromptOptions)


@dataclass
class OpenAIClientOptions:
    """`evaluate.openai`: requests to a server of OpenAI's protocol."""

    chat: bool = option("send each prompt as a chat message, to /chat/completions", False)


@dataclass
class HarnessOptions:
    """`evaluate.harness`: tasks of lm-evaluation-harness, `harness:<task>` in `tasks`."""

    url: str | None = option(
        "base URL of the endpoint, such as http://node1:8003/v1; null: the pipeline's", None
    )
    include_path: Path | None = option("folder with tasks of your own", None, is_path=True)
    num_fewshot: int | None = option(
        "examples before each question; null: the task's own", None, within=(0, 1000)
    )
    batch_size: int = option("prompts of a request; 1 of a chat", 16, within=(1, 2048))
    max_length: int | None = option(
        "tokens of a prompt and its answer; null: max_model_len of the endpoint",
        None,
        within=(1, TOKENS),
    )


@dataclass
class LatencyOptions:
    """`evaluate.latency`: latency and throughput by shape, batch size and requests in flight."""

    enabled: bool = option("measure latency", True)
    shapes: list[str] = option(
        "tokens in and out, such as 60+20, or use cases: question_answering, "
        "intent_classification, translation",
        ["32+8", "32+32"],
    )
    batch_sizes: list[Annotated[int, Within(1, INT32)]] = option("rows of a request", [1])
    concurrencies: list[Annotated[int, Within(1, _MAX_IN_FLIGHT)]] = option(
        "requests in flight", [1, 4]
    )
    requests: int = option("timed requests of a point", 16, within=(1, INT32))
    warmup: int = option("untimed requests before them", 2, within=(0, INT32))
    max_point_s: float = option("seconds after which a point ends", 3.0, within=(0.01, SECONDS))


@dataclass(frozen=True)
class RequestShape:
    """Tokens of a prompt and of its answer."""

    input_len: int
    output_len: int


# The use cases of NVIDIA's deployment guide.
USE_CASES = {
    "question_answering": RequestShape(60, 20),
    "intent_classification": RequestShape(225, 20),
    "translation": RequestShape(200, 200),
}


def parse_shape(text: str) -> RequestShape:
    """Parse a shape, such as 60+20, or the name of a use case.

    Raises:
        ValueError: it is neither, or longer than any context.
    """
    if text in USE_CASES:
        return USE_CASES[text]
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if found is None:
        raise ValueError(
            f"evaluate.latency.shapes has {text!r}; write tokens in and out such as 60+20, or one "
            f"of {', '.join(USE_CASES)}."
        )
    shape = RequestShape(int(found[1]), int(found[2]))
    if shape.input_len + shape.output_len > _MAX_SEQUENCE:
        raise ValueError(
            f"evaluate.latency.shapes has {text!r}, {shape.input_len + shape.output_len} tokens; "
            f"prompt and answer may have {_MAX_SEQUENCE} at most."
        )
    return shape


@dataclass(frozen=True)
class Bound:
    """Limits of one metric; null limits are not applied.

    Attributes:
        min, max: absolute limits, in the metric's unit; equality passes.
        paired: sentences that compare the samples with the baseline's, such as "no change" or "no
            drop of more than 1 point at 95 %", separated by semicolons.
    """

    min: float | None = None
    max: float | None = None
    paired: str | None = None

    @property
    def is_relative(self) -> bool:
        """Return whether this bound needs a baseline."""
        return self.paired is not None


Bounds = Mapping[str, Bound]  # by metric


@dataclass(frozen=True)
class EndpointOptions(JobOptions):
    """Keys of a stage that sends requests to a server."""

    ca: Path | None = option("use TLS, and trust these PEM certificates", None, is_path=True)
    token_file: Path | None = option(
        "send the first token in this file, of mode 600", None, is_path=True
    )

    @property
    def credentials(self) -> Credentials:
        """The TLS certificates and the token of requests."""
        return Credentials(self.ca is not None, self.ca, self.token_file)


@dataclass(frozen=True)
class EvaluateSection(EndpointOptions):
    """`evaluate`: what to measure (conf/evaluate/<name>.yaml)."""

    tasks: list[str] = option("what to measure, such as [lambada]", ["lambada"])
    server: str | None = option(
        "host:port of a running server, or its URL for protocol=openai; null: the pipeline's, or "
        "its own",
        None,
    )
    shared_server: Path | None = option(
        "folder of another run's deploy stage, whose server replaces its weights with this run's",
        None,
        is_path=True,
    )
    protocol: str = option(
        "protocol of requests: grpc or http (Triton's), or openai",
        "grpc",
        choices=("grpc", "http", OPENAI),
    )
    model: str | None = option(
        "name of the model at a server of protocol=openai; null: its only one", None
    )
    tokenizer: Path | None = option(
        "folder of the tokenizer for protocol=openai; null: the served model's",
        None,
        is_path=True,
    )
    output_dir: Path = option("where the report goes", is_path=True)
    concurrency: int = option("requests kept in flight", 32, within=(1, _MAX_IN_FLIGHT))
    limit: int | None = option("evaluate only this many samples", None, within=(1, INT32))
    seed: int = option("seed of random choices", 1234, within=(0, (1 << 63) - 1))
    request_timeout_s: float = option(
        "seconds after which a request has failed", 120.0, within=(0.001, SECONDS)
    )
    retry_s: float = option(
        "seconds for which a request is retried that a server puts off (429, 502, 503, 504) or "
        "loses; 0: never",
        120.0,
        within=(0, SECONDS),
    )
    gate: Fields = option(
        "bounds of metrics: <metric>.min, .max, or a sentence that compares the samples with the "
        "baseline's, such as 'no change' or 'no drop of more than 1 point at 95 %'",
        {},
    )
    advisory: list[str] = option("tasks whose bounds are reported, but do not decide", [])
    baseline: str = option(
        "compare the metrics with a baseline, or record them as one",
        "none",
        choices=("none", "compare", "update"),
    )
    baseline_path: Path | None = option("the baseline's file", None, is_path=True)
    lambada: LambadaOptions = field(default_factory=LambadaOptions)
    boolq: TextTaskOptions = field(default_factory=TextTaskOptions)
    mnli: TextTaskOptions = field(default_factory=TextTaskOptions)
    xnli: TextTaskOptions = field(default_factory=TextTaskOptions)
    squad: TextTaskOptions = field(default_factory=TextTaskOptions)
    translation: TextTaskOptions = field(default_factory=TextTaskOptions)
    summarization: TextTaskOptions = field(default_factory=TextTaskOptions)
    openai: OpenAIClientOptions = field(default_factory=OpenAIClientOptions)
    harness: HarnessOptions = field(default_factory=HarnessOptions)
    latency: LatencyOptions = field(default_factory=LatencyOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(EvaluateSection):
    """The section `evaluate`, and facts about the evaluated model from other sections.

    Attributes:
        data_dir: folder of data sets that have no path of their own.
        url: host and port of the server for `protocol`.
        openai_url: base URL of the endpoint of OpenAI's protocol; null without one.
        model_name, ensemble_name: Triton models for token ids and for text; without an ensemble
            (null), the client encodes and decodes text.
        tokenizer_dir: folder with the served tokenizer's files; null uses the server's
            preprocessing and postprocessing models, which costs more requests.
        weights_dir: the served folder of shards; its manifest gives the report the family and hash
            of the weights.
        served_dirs: the folder that another engine serves, and that of its adapter; the report
            states their hash.
        source_path: the checkpoint that was converted.
        max_seq_len: tokens of a sequence that the server is started with; None if only the model
            limits them, or the server was started by others.
        max_batch_size: rows of a request that the server accepts; None if unknown.
        given: config.ini values that the source checkpoint does not record.
        lacks: abilities (of task.py) that the server lacks.
        left_out: what is not measured because of that, one sentence each.
    """

    data_dir: Path
    url: str = "127.0.0.1:8001"
    openai_url: str | None = None
    model_name: str = "fastertransformer"
    ensemble_name: str | None = "ensemble"
    tokenizer_dir: Path | None = None
    weights_dir: Path | None = None
    served_dirs: tuple[Path, ...] = ()
    source_path: Path | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None
    given: tuple[tuple[str, str], ...] = ()
    lacks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
