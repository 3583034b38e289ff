"""Any task of lm-evaluation-harness, asked through the endpoint that speaks OpenAI's protocol.

The harness sends its own requests and makes its own metrics; here they become metrics of the
report, named `harness_<task>_<metric>`, with the filter behind it where a task has one.
It is the extra `harness` of this package.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inference.evaluation.openai_client import OpenAIClient
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.statistics import Z_95
from inference.evaluation.task import (
    Dataset,
    Metric,
    RequestFailedError,
    Sample,
    Score,
    Task,
    TextGenerator,
)

PREFIX = "harness:"
_PACKAGE = "lm_eval"
_NO_FILTER = "none"
_TIMEOUT_S = 10.0
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
    """One task of the harness, or a group of them; run whole when its first figure is wanted.

    Attributes:
        own_name: the task's name in the harness.
    """

    grouped = True
    only_served = True

    def __init__(self, name: str, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.name, self.own_name = name, name.removeprefix(PREFIX)
        # The beginning of every metric; the rest is known when the task was loaded.
        self.metric_names = (name.replace(PREFIX, "harness_", 1).replace("-", "_"),)
        self._lock = threading.Lock()
        self._outcome: Future[tuple[Metric, ...]] = Future()  # one a sample, or why there are none
        self._loaded: dict[str, Any] = {}  # the harness's tasks by name
        self._figures: list[_Figure] = []

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
        return problems

    def prepare(self) -> tuple[Dataset, Sequence[Sample]]:
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
        sizes = [len(task.eval_docs) for task in self._loaded.values()]
        digest = hashlib.sha256()
        for task in self._loaded.values():
            for document in task.eval_docs:
                digest.update(json.dumps(document, sort_keys=True, default=str).encode())
        dataset = Dataset(
            name=self.own_name,
            path=f"{_PACKAGE} {self.own_name}",
            sha256=digest.hexdigest(),
            total=sum(sizes),
            count=sum(size if limit is None else min(size, limit) for size in sizes),
            limit=limit,
        )
        samples = [
            Sample(index, f"{each.task}, {each.metric}", target="", group=self._group(each))
            for index, each in enumerate(self._figures)
        ]
        return dataset, samples

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Return one figure; the first that is wanted runs the task."""
        del model  # the harness asks by itself
        with self._lock:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._run())
                except RequestFailedError as error:
                    self._outcome.set_exception(error)
        value = self._outcome.result()[sample.index].value
        return Score(values={sample.group: value}, answer=f"{value:.6g}")

    def metrics(self, samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
        """Return the harness's figures with its own standard errors."""
        del samples, scores
        return self._outcome.result()

    def _group(self, figure: _Figure) -> str:
        """Return a figure's name behind that of the task that was asked for."""
        if figure.task == self.own_name:
            return figure.key
        return f"{figure.task}_{figure.key}".replace("-", "_")

    def _metric(self, figure: _Figure, results: Mapping[str, Any]) -> Metric:
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
            from_samples=False,
        )

    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=self.options.harness.include_path)

    def _run(self) -> tuple[Metric, ...]:
        from lm_eval import simple_evaluate

        harness, arguments = self.options.harness, self._model_arguments()
        try:
            results = simple_evaluate(
                model="local-completions",
                model_args=arguments,
                tasks=[self.own_name],
                num_fewshot=harness.num_fewshot,
                batch_size=harness.batch_size,
                limit=self.options.limit,
                task_manager=self._manager(),
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
                random_seed=self.options.seed,
                numpy_random_seed=self.options.seed % (1 << 32),
                fewshot_random_seed=self.options.seed,
            )
            assert results is not None, "the first process of an evaluation has the results"
            return tuple(self._metric(figure, results) for figure in self._figures)
        except Exception as error:  # the harness and its clients raise anything
            raise RequestFailedError(f"lm_eval: {error!r}") from error

    def _model_arguments(self) -> dict[str, Any]:
        options, url = self.options, self.options.openai_url
        assert url is not None, "checked before the start"
        token = options.credentials.headers().get("authorization", "").removeprefix("Bearer ")
        client = OpenAIClient(url, options.credentials, timeout_s=_TIMEOUT_S)
        model = client.get(path := f"/models/{options.model_name}")
        longest = model.get("max_model_len") if isinstance(model, dict) else None
        if not isinstance(longest, int):
            raise RequestFailedError(f"{client.url}{path} states no number as max_model_len")
        arguments = {
            "model": options.model_name,
            "base_url": f"{url}/completions",
            "num_concurrent": options.concurrency,
            "timeout": int(options.request_timeout_s),
            "max_length": longest,  # of a prompt and its answer
            "tokenizer_backend": "remote",
            "seed": options.seed,
        }
        if token:
            arguments |= {"header": {"Authorization": f"Bearer {token}"}, "auth_token": token}
        if options.ca is not None:
            arguments["ca_cert_path"] = options.ca
        return arguments
