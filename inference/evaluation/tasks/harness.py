"""Any task of lm-evaluation-harness, asked through the endpoint that speaks OpenAI's protocol.

The harness words the requests and makes its own metrics; here they become metrics of the report,
named `harness_<task>_<metric>`, with the filter behind it where a task has one. The requests are
sent by the client of this package, so that only replies that are answers are graded.
It is the extra `harness` of this package.
"""

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from foundations.files.json_content import Table
from inference.evaluation.answered import REQUESTS_AGAIN, Answers, answer_journal
from inference.evaluation.openai_client import (
    NEUTRAL,
    PROBE,
    OpenAIClient,
    choices_of,
    client_of,
    listed_model,
)
from inference.evaluation.options import OPENAI, EvaluationOptions
from inference.evaluation.retry import no_retries_after_interrupt
from inference.evaluation.statistics import Z_95
from inference.evaluation.task import (
    Dataset,
    Drawn,
    EvaluationError,
    Metric,
    Metrics,
    Prediction,
    RequestFailedError,
    Sample,
    Score,
    Tally,
    Task,
    TextGenerator,
)

PREFIX = "harness:"
_PACKAGE = "lm_eval"
_NO_FILTER = "none"
_BOOTSTRAP = 1000  # draws for the standard errors of metrics other than means
_FRACTIONS = ("acc", "exact_match", "f1")  # metrics between 0 and 1


@dataclass(frozen=True)
class _Figure:
    """One metric of one task, as the harness names it."""

    task: str
    metric: str
    filter: str

    @property
    def key(self) -> str:
        """The metric's name with its filter's."""
        end = "" if self.filter == _NO_FILTER else f"_{self.filter}"
        return f"{self.metric}{end}".replace("-", "_")


class HarnessTask(Task):
    """One task of the harness, or a group of them, whose figures are its samples.

    Attributes:
        own_name: the task's name in the harness.
    """

    grouped = True

    def __init__(self, name: str, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.name, self.own_name = name, name.removeprefix(PREFIX)
        # The beginning of every metric; the rest is known when the task was loaded.
        self.metric_names = (name.replace(PREFIX, "harness_", 1).replace("-", "_"),)
        self._found: Metrics = ()  # one a sample
        self._loaded: dict[str, Any] = {}  # the harness's tasks by name
        self._figures: list[_Figure] = []
        self._drawn: Drawn | None = None
        self._answers: Answers | None = None

    def problems(self) -> list[str]:
        """Return that the harness, the endpoint it asks or a folder is missing."""
        problems = []
        if find_spec(_PACKAGE) is None:
            problems.append(
                f"evaluate.tasks has {self.name}, and lm-evaluation-harness is not installed: pip "
                "install 'lm_eval[api]' 'pyarrow<22'."
            )
        if self.options.openai_url is None:
            problems.append(
                f"evaluate.tasks has {self.name}, which asks the endpoint of OpenAI's protocol; "
                "set deploy.openai.enabled=true, or, for a server that runs already, "
                "evaluate.harness.url."
            )
        folder = self.options.harness.include_path
        if folder is not None and not Path(folder).is_dir():
            problems.append(f"evaluate.harness.include_path={folder} is not a folder.")
        if self.options.tokenizer is not None and find_spec("transformers") is None:
            problems.append(
                f"evaluate.tasks has {self.name}, which reads evaluate.tokenizer by transformers; "
                "pip install transformers, or set it to null where the endpoint has its own."
            )
        return problems

    def prepare(self) -> Drawn:
        """Load the task's documents; a sample here is a figure to be measured.

        Raises:
            ValueError: the harness has no such task, or cannot get its data.
        """
        try:
            self._loaded = dict(self._manager().load([self.own_name])["tasks"])
        except Exception as error:  # the harness and its data sets raise anything
            raise ValueError(
                f"evaluate.tasks={self.name} cannot be loaded by lm_eval: {error}"
            ) from error
        if not self._loaded:
            raise ValueError(f"evaluate.tasks={self.name}: lm_eval has no such task")
        self._figures = [
            _Figure(name, metric, pipeline.name)
            for name, task in self._loaded.items()
            for metric in task.aggregation()
            for pipeline in task._filters  # the harness has no public name for them
        ]
        limit = self.options.limit
        texts = {
            name: [json.dumps(each, sort_keys=True, default=str) for each in task.eval_docs]
            for name, task in self._loaded.items()
        }
        sizes = [len(each) for each in texts.values()]
        dataset = Dataset(
            name=self.own_name,
            path=f"{_PACKAGE} {self.own_name}",
            sha256=hashlib.sha256("".join(chain(*texts.values())).encode()).hexdigest(),
            total=sum(sizes),
            count=sum(min(size, limit or size) for size in sizes),
            limit=limit,
        )
        samples = [
            Sample(index, f"{each.task}, {each.metric}", target="", group=self._group(each))
            for index, each in enumerate(self._figures)
        ]
        self._drawn = dataset, samples
        return dataset, samples

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Return one figure."""
        del model  # the harness has asked by itself
        value = self._found[sample.index].value
        return Score(values={sample.group: value}, answer=f"{value:.6g}")

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the harness's figures with its own standard errors."""
        del found
        return self._found

    def _group(self, figure: _Figure) -> str:
        """Return a figure's name behind that of the task that was asked for."""
        if figure.task == self.own_name:
            return figure.key
        return f"{figure.task}_{figure.key}".replace("-", "_")

    def _metric(self, figure: _Figure, results: Table) -> Metric:
        found = results["results"][figure.task]
        value = float(found[f"{figure.metric},{figure.filter}"])
        given = found.get(f"{figure.metric}_stderr,{figure.filter}")
        error = float(given) if isinstance(given, int | float) else 0.0  # "N/A" where it has none
        is_fraction = figure.metric.startswith(_FRACTIONS)
        low, high = value - Z_95 * error, value + Z_95 * error
        higher = self._loaded[figure.task].higher_is_better().get(figure.metric, True)
        return Metric(
            name=f"{self.metric_names[0]}_{self._group(figure)}",
            key=figure.key,
            value=value,
            stderr=error,
            low=max(low, 0.0) if is_fraction else low,
            high=min(high, 1.0) if is_fraction else high,
            count=int(results["n-samples"][figure.task]["effective"]),
            unit="fraction" if is_fraction else "",
            higher_is_better=bool(higher),
            method=f"{figure.metric} of {figure.task}, lm-evaluation-harness {version(_PACKAGE)}",
            sample_value=self._group(figure),
        )

    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=self.options.harness.include_path)

    @cached_property
    def _client(self) -> OpenAIClient:
        """Sends what is tried before the harness asks, and the harness's requests."""
        assert self.options.openai_url is not None, "checked before the start"
        return client_of(self.options, self.options.openai_url)

    @property
    def tally(self) -> Tally:
        """The ends of the harness's requests."""
        return self._client.tally

    @property
    def reused(self) -> int:
        """The replies of an earlier run that stood for requests of the harness."""
        return 0 if self._answers is None else self._answers.reused

    def start(self) -> None:
        """Run the task. Raises EvaluationError with what the harness or its requests raised."""
        from lm_eval import simple_evaluate

        options, harness = self.options, self.options.harness
        try:
            with (
                ThreadPoolExecutor(options.concurrency, "harness") as threads,
                no_retries_after_interrupt(),
            ):
                results = simple_evaluate(
                    model=self._model(threads),
                    tasks=[self.own_name],
                    num_fewshot=harness.num_fewshot,
                    limit=options.limit,
                    task_manager=self._manager(),
                    bootstrap_iters=_BOOTSTRAP,
                    log_samples=False,
                    apply_chat_template=options.openai.chat,
                    random_seed=options.seed,
                    numpy_random_seed=options.seed % (1 << 32),
                    fewshot_random_seed=options.seed,
                )
            assert results is not None, "the first process of an evaluation has the results"
            self._found = tuple(self._metric(figure, results) for figure in self._figures)
        except EvaluationError:
            raise
        except Exception as error:  # the harness and its tasks raise anything
            raise RequestFailedError(f"lm_eval: {error!r}") from error

    def _model(self, threads: ThreadPoolExecutor) -> Any:
        """Return the model as the harness asks it."""
        arguments, client = self._model_arguments(), self._client
        neutral = client.accepted(client.asking(arguments["model"], PROBE, 1), NEUTRAL)
        client.tally = Tally()  # without what was tried

        def ask(body: Table) -> Table:
            request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            return answers.reply(request, lambda: client.patient({**neutral, **body}))

        def reuse(reply: Table) -> None:
            for choice in choices_of(reply):
                client.count_end(choice)

        assert self._drawn is not None, "prepared before"
        journal = answer_journal(self, *self._drawn)
        self._answers = answers = Answers(journal, ["choices"], again=REQUESTS_AGAIN, reuse=reuse)
        return _asking(ask, threads, chat=client.chat)(**arguments)

    def _model_arguments(self) -> dict[str, Any]:
        """Return what the harness must know of the endpoint.

        Raises:
            EvaluationError: it does not answer, or does not say how long its context is.
        """
        options, chat = self.options, self.options.openai.chat
        # The name in the pipeline is that of its own endpoint.
        given = options.model if options.protocol == OPENAI else options.model_name
        model = listed_model(self._client, given)
        longest = options.harness.max_length or model.get("max_model_len")
        if not isinstance(longest, int):
            raise RequestFailedError(
                f"{self._client.url}/models states no number as max_model_len of {model['id']}; "
                "set evaluate.harness.max_length"
            )
        token = options.credentials.headers().get("authorization", "").removeprefix("Bearer ")
        return {
            "model": model["id"],
            "base_url": self._client.url + self._client.path,
            "num_concurrent": max(2, options.concurrency),  # by which it asks as _asking expects
            "batch_size": self._batch_size(str(model["id"])),
            "timeout": int(options.request_timeout_s),
            "max_length": longest,  # of a prompt and its answer
            "max_retries": 1,  # the client's own are enough
            "seed": options.seed,
            "auth_token": token or None,  # of the endpoint's tokenizer
            "ca_cert_path": options.ca,
            **({} if chat else self._tokenizer(str(model["id"]))),
        }

    def _batch_size(self, model: str) -> int:
        """Return the prompts of a request, which some servers take one at a time."""
        several = self._client.asking(model, [PROBE, PROBE], 1)
        if self._client.chat or self._client.taken(several) is None:
            return 1
        return self.options.harness.batch_size

    def _tokenizer(self, model: str) -> dict[str, Any]:
        """Return by what the harness counts tokens, and whether the server takes their ids.

        The server's own word goes before a folder, which transformers may not read.
        """
        folder = self.options.tokenizer
        if self._client.has_tokenizer:
            return {"tokenizer_backend": "remote", "tokenized_requests": True}
        if folder is None:
            return {"tokenizer_backend": None}
        takes_ids = self._client.taken(self._client.asking(model, [1], 1)) is not None
        return {
            "tokenizer_backend": "huggingface",
            "tokenizer": folder,
            "tokenized_requests": takes_ids,
        }


def _asking(ask: Callable[[Table], Any], threads: ThreadPoolExecutor, *, chat: bool) -> Any:
    """Return the harness's class of a model, whose requests `ask` answers in one of `threads`."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    base: Any = LocalChatCompletion if chat else LocalCompletionsAPI

    class AskedModel(base):  # type: ignore[misc]
        """Words requests and reads answers as the harness does."""

        async def amodel_call(
            self,
            session: object,
            sem: object,
            messages: Any,
            *,
            generate: bool = True,
            cache_keys: object = None,
            ctxlens: Any = None,
            gen_kwargs: Any = None,
            **more: Any,
        ) -> Any:
            """Return what the harness reads of the answer to one request."""
            del session, sem, cache_keys
            body = self._create_payload(
                self.create_message(messages),
                generate=generate,
                gen_kwargs=copy.deepcopy(gen_kwargs),
                seed=self._seed,
                **more,
            )
            answer = await asyncio.get_running_loop().run_in_executor(threads, ask, body)
            if generate:
                return self.parse_generations(outputs=answer)
            return self.parse_logprobs(outputs=answer, tokens=messages, ctxlens=ctxlens)

    return AskedModel
