"""Any task of lm-evaluation-harness, over an endpoint of OpenAI's protocol.

The harness formats the requests and computes its own metrics, which become metrics of the report
with the name `harness_<task>_<metric>[_<filter>]`. The client of this package sends the requests,
so that only complete answers are scored. The dependencies are the extra `harness` of this package.
"""

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from typing import Any

from foundations.files.json_content import Fields, Table
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
    DatasetSamples,
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
_BOOTSTRAP = 1000  # resamples for the standard errors of metrics other than means
# Metrics between 0 and 1 by the harness's own aggregations. Those of a task may be in percent, as
# squadv2's are.
_FRACTIONS, _OWN_AGGREGATIONS = ("acc", "exact_match", "f1"), "lm_eval.api.metrics"


@dataclass(frozen=True)
class _HarnessMetric:
    """One metric of one task, in the harness's names."""

    task: str
    metric: str
    filter: str

    @property
    def key(self) -> str:
        """The metric's name, with that of its filter."""
        suffix = "" if self.filter == _NO_FILTER else f"_{self.filter}"
        return f"{self.metric}{suffix}".replace("-", "_")


class HarnessTask(Task):
    """A task of the harness, or a group of tasks; each of its metrics is a sample here.

    Attributes:
        harness_name: the task's name in the harness.
    """

    grouped = True

    def __init__(self, name: str, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.name, self.harness_name = name, name.removeprefix(PREFIX)
        # The prefix of every metric's name; the rest is known after the task is loaded.
        self.metric_names = (name.replace(PREFIX, "harness_", 1).replace("-", "_"),)
        self._found: Metrics = ()  # one for each sample
        self._loaded: Fields = {}  # the harness's tasks by name
        self._harness_metrics: list[_HarnessMetric] = []
        self._prepared: DatasetSamples | None = None
        self._answers: Answers | None = None

    def problems(self) -> Iterator[str]:
        """Yield a problem if the harness, its endpoint, a folder or transformers is missing."""
        if find_spec(_PACKAGE) is None:
            yield (
                f"evaluate.tasks has {self.name}, and lm-evaluation-harness is not installed: pip "
                "install 'lm_eval[api]'."
            )
        if self.options.openai_url is None:
            yield (
                f"evaluate.tasks has {self.name}, which needs an endpoint of OpenAI's protocol; "
                "set deploy.openai.enabled=true, or evaluate.harness.url for a running server."
            )
        folder = self.options.harness.include_path
        if folder is not None and not folder.is_dir():
            yield f"evaluate.harness.include_path={folder} is not a folder."
        if self.options.tokenizer is not None and find_spec("transformers") is None:
            yield (
                f"evaluate.tasks has {self.name}, which needs transformers for evaluate.tokenizer: "
                "pip install transformers, or set evaluate.tokenizer=null if the endpoint "
                "describes its own."
            )

    def prepare(self) -> DatasetSamples:
        """Load the task's documents, and return its metrics as samples.

        Raises:
            ValueError: the harness has no such task, or cannot get its data.
        """
        try:
            self._loaded = dict(self._manager().load([self.harness_name])["tasks"])
        except Exception as error:  # the harness and its data sets raise anything
            raise ValueError(
                f"evaluate.tasks={self.name} cannot be loaded by lm_eval: {error}"
            ) from error
        if not self._loaded:
            raise ValueError(f"evaluate.tasks={self.name}: lm_eval has no such task")
        self._harness_metrics = [
            _HarnessMetric(name, metric, pipeline.name)
            for name, task in self._loaded.items()
            for metric in task.aggregation()
            for pipeline in task._filters  # the harness has no public attribute for them
        ]
        limit = self.options.limit
        texts = {
            name: [json.dumps(document, sort_keys=True, default=str) for document in task.eval_docs]
            for name, task in self._loaded.items()
        }
        sizes = [*map(len, texts.values())]
        dataset = Dataset(
            name=self.harness_name,
            path=f"{_PACKAGE} {self.harness_name}",
            sha256=hashlib.sha256("".join(chain(*texts.values())).encode()).hexdigest(),
            total=sum(sizes),
            count=sum(min(size, limit or size) for size in sizes),
            limit=limit,
        )
        samples = [
            Sample(index, f"{each.task}, {each.metric}", target="", group=self._group(each))
            for index, each in enumerate(self._harness_metrics)
        ]
        self._prepared = dataset, samples
        return dataset, samples

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Return the value of one metric."""
        del model  # `start` has sent the requests
        value = self._found[sample.index].value
        return Score(values={sample.group: value}, answer=f"{value:.6g}")

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the harness's metrics, with its standard errors."""
        del found
        return self._found

    def _group(self, metric: _HarnessMetric) -> str:
        """Return a metric's name after that of the requested task."""
        if metric.task == self.harness_name:
            return metric.key
        return f"{metric.task}_{metric.key}".replace("-", "_")

    def _metric(self, metric: _HarnessMetric, results: Table) -> Metric:
        found = results["results"][metric.task]
        value = float(found[f"{metric.metric},{metric.filter}"])
        stderr = found.get(f"{metric.metric}_stderr,{metric.filter}")
        error = float(stderr) if isinstance(stderr, int | float) else 0.0  # "N/A" without one
        task = self._loaded[metric.task]
        is_own = task.aggregation()[metric.metric].__module__ == _OWN_AGGREGATIONS
        is_fraction = is_own and metric.metric.startswith(_FRACTIONS)
        low, high = value - Z_95 * error, value + Z_95 * error
        return Metric(
            name=f"{self.metric_names[0]}_{self._group(metric)}",
            key=metric.key,
            value=value,
            stderr=error,
            low=max(low, 0.0) if is_fraction else low,
            high=min(high, 1.0) if is_fraction else high,
            count=int(results["n-samples"][metric.task]["effective"]),
            unit="fraction" if is_fraction else "",
            # None if the task does not say
            higher_is_better=task.higher_is_better().get(metric.metric) is not False,
            method=f"{metric.metric} of {metric.task}, lm-evaluation-harness {version(_PACKAGE)}",
            sample_value=self._group(metric),
        )

    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        folder = self.options.harness.include_path
        return TaskManager(include_path=None if folder is None else str(folder))

    @cached_property
    def _client(self) -> OpenAIClient:
        """The client of the harness's requests, and of those that find the server's abilities."""
        assert self.options.openai_url is not None, "checked before the start"
        return client_of(self.options, self.options.openai_url)

    @property
    def tally(self) -> Tally:
        """The outcomes of the harness's requests."""
        return self._client.tally

    @property
    def reused(self) -> int:
        """The harness's requests that replies of an earlier run replaced."""
        return 0 if self._answers is None else self._answers.reused

    def start(self) -> None:
        """Run the task. Raises EvaluationError if the harness or a request fails."""
        from lm_eval import simple_evaluate

        options, harness = self.options, self.options.harness
        try:
            with (
                ThreadPoolExecutor(options.concurrency, "harness") as threads,
                no_retries_after_interrupt(),
            ):
                results = simple_evaluate(
                    model=self._model(threads),
                    tasks=[self.harness_name],
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
            assert results is not None, "only other ranks of the harness get no results"
            self._found = tuple(self._metric(metric, results) for metric in self._harness_metrics)
        except EvaluationError:
            raise
        except Exception as error:  # the harness and its tasks raise anything
            raise RequestFailedError(f"lm_eval: {error!r}") from error

    def _model(self, threads: ThreadPoolExecutor) -> Any:
        """Return the model object for the harness."""
        arguments, client = self._model_arguments(), self._client
        neutral = client.accepted_parameters(
            client.greedy_request(arguments["model"], PROBE, 1), NEUTRAL
        )
        client.tally = Tally()  # do not count the requests above

        def ask(body: Table) -> Table:
            request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            return answers.reply(request, lambda: client.complete_with_retries({**neutral, **body}))

        def reuse(reply: Table) -> None:
            for choice in choices_of(reply):
                client.count_end(choice)

        assert self._prepared is not None, "prepare() comes first"
        journal = answer_journal(self, *self._prepared)
        self._answers = answers = Answers(journal, ["choices"], again=REQUESTS_AGAIN, reuse=reuse)
        return _model_class(ask, threads, chat=client.chat)(**arguments)

    def _model_arguments(self) -> Fields:
        """Return the arguments of the harness's model class.

        Raises:
            EvaluationError: the endpoint does not answer, or does not state its context length.
        """
        options, chat = self.options, self.options.openai.chat
        # The pipeline's own endpoint serves the model under its Triton name.
        name = options.model if options.protocol == OPENAI else options.model_name
        model = listed_model(self._client, name)
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
            "num_concurrent": max(2, options.concurrency),  # above 1, the harness uses amodel_call
            "batch_size": self._batch_size(str(model["id"])),
            "timeout": int(options.request_timeout_s),
            "max_length": longest,  # of a prompt and its answer
            "max_retries": 1,  # the client retries
            "seed": options.seed,
            "auth_token": token or None,  # for the endpoint's tokenizer
            "ca_cert_path": None if options.ca is None else str(options.ca),
            **({} if chat else self._tokenizer(str(model["id"]))),
        }

    def _batch_size(self, model: str) -> int:
        """Return the number of prompts in a request; some servers accept only one."""
        several = self._client.greedy_request(model, [PROBE, PROBE], 1)
        if self._client.chat or self._client.complete_or_none(several) is None:
            return 1
        return self.options.harness.batch_size

    def _tokenizer(self, model: str) -> Fields:
        """Return the harness's tokenizer arguments, and whether requests use token ids.

        The server's description has precedence over a folder, which transformers may not load.
        """
        folder = self.options.tokenizer
        if self._client.has_tokenizer:
            return {"tokenizer_backend": "remote", "tokenized_requests": True}
        if folder is None:
            return {"tokenizer_backend": None}
        takes_ids = (
            self._client.complete_or_none(self._client.greedy_request(model, [1], 1)) is not None
        )
        return {
            "tokenizer_backend": "huggingface",
            "tokenizer": str(folder),
            "tokenized_requests": takes_ids,
        }


def _model_class(ask: Callable[[Table], Any], threads: ThreadPoolExecutor, *, chat: bool) -> Any:
    """Return a model class of the harness, whose requests `ask` answers in one of `threads`."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    base: Any = LocalChatCompletion if chat else LocalCompletionsAPI

    class ClientModel(base):  # type: ignore[misc]
        """The harness's model, with the transport replaced."""

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
            """Send one request, and return the harness's view of its answer."""
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

    return ClientModel
