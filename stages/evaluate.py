"""Stage `evaluate`: query a running server, score its answers, write a report, apply the gate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path

from pydantic_core import to_jsonable_python

from export_scripts.ft.identity import checkpoint_hash
from export_scripts.ft.tokenizer_files import find_tokenizer
from foundations.files.json_content import Fields, dotted
from foundations.files.lock import folder_lock
from foundations.files.replace import replace_file
from foundations.job_options import JOB_KEYS
from inference.evaluation.gate import EXIT_NOT_EVALUATED
from inference.evaluation.openai_client import base_url
from inference.evaluation.options import OPENAI, EvaluationOptions
from inference.evaluation.record import RunFacts, StageTiming
from inference.evaluation.run.checks import check_evaluation, unreachable_data
from inference.evaluation.task import EvaluationError
from stages.base import Stage, StageError, Summary
from stages.deploy_config import DeployConfig, check_deploy, problems_of_exchange
from stages.endpoint import RELOAD_NAME, STOP_NAME, ServerEndpoint, read_endpoint, server_log
from stages.progress import Progress
from stages.record import RECORD_NAME, now, read_record, readable_record
from stages.serving import serving

REPORT_NAME = "report.json"
_REPORT_PAGE = "report.html"
# Options that do not change the report.
_NOT_IDENTITY = (*JOB_KEYS, "url", "openai_url", "shared_server")
_EARLIER_STAGES = ("convert", "export", "deploy")
_POLL_S = 0.5
_NEEDS_OPENAI = (
    "evaluate.protocol=openai needs a server of that protocol; set deploy.openai.enabled=true"
)


class NotEvaluatedError(StageError):
    """The evaluation could not be done."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_NOT_EVALUATED)


@dataclass(eq=False)
class EvaluateStage(Stage):
    """Writes a report about a served model.

    Attributes:
        options: tasks, data, report and gate; `url` is replaced by the server's. Without `server`,
            the server at `endpoint_path` is evaluated, or one is started.
        deploy: the server to start if there is no other.
        stops_server: whether to end the pipeline's server after the evaluation.
        endpoint_path: address file of the pipeline's deploy job; None without such a job.
        facts: facts about the model and the run for the report; the times of earlier stages are
            added from their records.
    """

    name = "evaluate"
    # An existing report of another configuration is renamed and kept.
    guards_configuration = False

    options: EvaluationOptions
    deploy: DeployConfig
    stops_server: bool = False
    endpoint_path: Path | None = None
    facts: RunFacts = field(default_factory=lambda: RunFacts(name=""))

    def check(self) -> Iterator[str]:
        """Yield the problems of tasks, data and bounds, and of a server to be started."""
        options, server = self.options, self.options.server
        yield from check_evaluation(options)
        if options.shared_server is not None:
            yield from problems_of_exchange(self.deploy)
        if server is None:
            if self.endpoint_path is None:
                yield from check_deploy(self.deploy)
            return
        if not is_address(server, options.protocol):
            yield (
                f"evaluate.server={server} is not an address; write host:port, such as "
                "127.0.0.1:8001 (for evaluate.protocol=openai also http://host:port/v1), or null "
                "to use the pipeline's own server."
            )
        folder = options.tokenizer
        if options.protocol == OPENAI and (folder is None or not find_tokenizer(folder)):
            yield (
                f"evaluate.tokenizer={folder} holds no tokenizer; for evaluate.protocol=openai "
                "give the folder of the served model's tokenizer.json or tokenizer.model."
            )

    def missing_now(self) -> list[str]:
        """Return the data sets that are missing."""
        return unreachable_data(self.options)

    @property
    def _output_dir(self) -> Path:
        return self.options.output_dir

    def outputs(self) -> list[Path]:
        """Return the report."""
        return [self._output_dir / REPORT_NAME]

    def inputs(self) -> list[Path]:
        """Return the files that the pipeline's own server serves; none with `evaluate.server`."""
        if self.options.server:
            return []
        deploy = self.deploy
        if deploy.is_other_engine:
            return [deploy.folder]
        return [deploy.weights_dir, *sorted(deploy.folder.glob("*/config.pbtxt"))]

    def marker_path(self) -> Path:
        """Return the marker next to the report."""
        return self._output_dir / "evaluate.json"

    def identity(self) -> Fields:
        """Return every option that can change the report, and the engine."""
        options = to_jsonable_python(self.options)
        for name in _NOT_IDENTITY:
            options.pop(name)
        return {
            **dotted(options, "evaluate."),
            "deploy.engine": self.deploy.engine,
            "deploy.command": self.deploy.command_line,
        }

    def other_logs(self, job_id: str) -> list[Path]:
        """Return the log of the evaluation's own server."""
        return [server_log(self.job.folder, job_id)]

    def stop_grace_s(self) -> float:
        """Return how long the job may take to end, including its own server, in seconds."""
        return self.deploy.drain_s + super().stop_grace_s()

    def run(self, progress: Progress) -> Summary:
        """Evaluate, write the report and apply the gate.

        Raises:
            NotEvaluatedError: the server does not answer, or the data is unavailable.
            StageError: a bound is breached, or needs more samples to be decided; the report is
                complete.
        """
        if self.marker_path().exists():  # keep an earlier report under the first free name
            free = (self._output_dir.with_name(f"{self._output_dir.name}.{n}") for n in count(1))
            self._output_dir.rename(next(each for each in free if not each.exists()))
        try:
            with self._server(progress) as (url, openai_url, ready_at):
                options = replace(self.options, url=url, openai_url=openai_url)
                summary = self._evaluate(options, self._facts(ready_at), progress)
        except Exception:
            self._end_server()
            raise
        # A signal leaves the server running: the job may be requeued, and then needs it.
        self._end_server()
        return summary

    def _end_server(self) -> None:
        """Ask the server of the pipeline to end, if only this evaluation needs it."""
        if self.endpoint_path is not None and self.stops_server:
            self.endpoint_path.with_name(STOP_NAME).touch()

    def _evaluate(self, options: EvaluationOptions, facts: RunFacts, progress: Progress) -> Summary:
        from inference.evaluation.report.document import part_text
        from inference.evaluation.run.evaluator import evaluate

        try:
            report = evaluate(options, facts, progress=partial(progress.update, unit="samples"))
        except (EvaluationError, ValueError) as error:  # the server, or data and options
            raise NotEvaluatedError(str(error)) from error
        summary = {
            "metrics": {metric.name: metric.value for metric in report.metrics},
            "times": {task.name: part_text("times", task.requests) for task in report.tasks},
            "remarks": [str(each) for each in report.gate.verdicts if each.drop is not None],
            "report": str(self._output_dir / _REPORT_PAGE),
        }
        if deciding := report.gate.deciding:
            text = "; ".join(map(str, deciding))
            raise StageError(text, summary=summary, exit_code=report.gate.exit_code)
        return summary

    def _facts(self, ready_at: str) -> RunFacts:
        """Return the facts, with the times of earlier stages of the same results folder."""
        timings = []
        for name in _EARLIER_STAGES:
            found = readable_record(self.job.folder.parent / name / RECORD_NAME)
            if found is None or not found.started_at:
                continue
            seconds = found.seconds
            if seconds is None:  # a running server: the time until it was ready
                began = datetime.fromisoformat(found.started_at)
                seconds = (datetime.fromisoformat(ready_at) - began).total_seconds()
            timings.append(StageTiming(found.stage, found.state, seconds))
        return replace(self.facts, stages=tuple(timings))

    @contextmanager
    def _server(self, progress: Progress) -> Iterator[tuple[str, str | None, str]]:
        """Yield a ready server's address for the protocol, its OpenAI URL and its ready time."""
        if self.options.server is not None:
            yield self.options.server, self.options.openai_url, now()
        elif self.options.shared_server is not None and self.endpoint_path is not None:
            with self._lease_shared_server(self.endpoint_path, progress) as endpoint:
                yield self._addresses(endpoint)
        elif self.endpoint_path is not None:
            yield self._addresses(self._wait_for_endpoint(self.endpoint_path, progress))
        else:
            with serving(self.deploy, self.job.folder, progress) as (_, endpoint):
                yield self._addresses(endpoint)

    @property
    def _checkpoint(self) -> str:
        """The hash by which a server identifies the weights of this run."""
        if found := checkpoint_hash(self.deploy.weights_dir):
            return found
        raise NotEvaluatedError(
            f"{self.deploy.weights_dir} has no manifest to identify its weights; convert again"
        )

    @contextmanager
    def _lease_shared_server(self, path: Path, progress: Progress) -> Iterator[ServerEndpoint]:
        """Yield the server of another run with the weights of this run loaded.

        Raises:
            NotEvaluatedError: It does not serve these weights, or did not at the end; the report is
                then deleted.
        """
        busy = f"evaluate.shared_server={path.parent} is in use by another evaluation"
        try:
            with folder_lock(path.with_name(".in_use.lock"), busy):
                endpoint = self._load_weights(path, progress)
                self._check_served(endpoint)
                try:
                    yield endpoint
                except StageError as error:  # the gate's errors leave a complete report
                    if not isinstance(error, NotEvaluatedError):
                        self._check_served(endpoint)
                    raise
                self._check_served(endpoint)
        except ValueError as error:  # the lock is held
            raise NotEvaluatedError(str(error)) from error

    def _load_weights(self, path: Path, progress: Progress) -> ServerEndpoint:
        """Ask a server to load the weights of this run, and wait until it serves them."""
        wanted, asked = self._checkpoint, None
        deadline = time.monotonic() + self.deploy.ready_timeout_s
        while True:
            endpoint = self._wait_for_endpoint(path, progress)
            if endpoint.served.get("checkpoint") == wanted:
                return endpoint
            if asked != endpoint:  # ask a restarted server again
                replace_file(path.with_name(RELOAD_NAME), str(self.deploy.folder))
                asked = endpoint
                progress.update("exchanging the server's weights")
            if time.monotonic() > deadline:
                raise NotEvaluatedError(
                    f"the server of {path} has not loaded {self.deploy.folder} within "
                    f"deploy.ready_timeout_s={self.deploy.ready_timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _check_served(self, endpoint: ServerEndpoint) -> None:
        """Check that a server serves the weights of this run; if not, delete the report.

        Raises:
            NotEvaluatedError: It serves others.
        """
        from inference.evaluation.report.files import FILE_NAMES
        from inference.evaluation.run.served_model import served_checkpoint

        try:
            served = served_checkpoint(self.options, endpoint.at(endpoint.http))
        except EvaluationError as error:
            served = str(error)
        if served != self._checkpoint:
            for name in FILE_NAMES:
                (self._output_dir / name).unlink(missing_ok=True)
            raise NotEvaluatedError(
                f"{endpoint} serves {served or 'unknown weights'}; this run's are "
                f"{self._checkpoint}"
            )

    def _wait_for_endpoint(self, path: Path, progress: Progress) -> ServerEndpoint:
        """Wait for the address that the deploy job publishes, and return it."""
        deadline = time.monotonic() + self.deploy.ready_timeout_s
        progress.update("waiting for the server")
        while True:
            endpoint = read_endpoint(path)
            record = read_record(path.with_name(RECORD_NAME))
            # Ignore an address that an earlier, killed job left behind.
            if endpoint is not None and (record is None or record.job_id == endpoint.job_id):
                return endpoint
            if record is not None and record.is_final:
                cause = f": {record.error.splitlines()[0]}" if record.error else ""
                raise NotEvaluatedError(
                    f"the server's job {record.job_id} has {record.state}{cause}"
                )
            if time.monotonic() > deadline:
                raise NotEvaluatedError(
                    f"no server has published its address in {path} within "
                    f"deploy.ready_timeout_s={self.deploy.ready_timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _addresses(self, endpoint: ServerEndpoint) -> tuple[str, str | None, str]:
        options, openai = self.options, endpoint.address(OPENAI)
        if (address := endpoint.address(options.protocol)) is None:
            raise NotEvaluatedError(_NEEDS_OPENAI)
        url = options.harness.url
        if url is None and openai is not None:
            url = f"{'http' if options.ca is None else 'https'}://{openai}/v1"
        return address, url, endpoint.ready_at


def is_address(text: str, protocol: str) -> bool:
    """Return whether a text is `host:port`, or, for OpenAI's protocol, a URL."""
    if protocol == OPENAI:
        try:
            base_url(text, uses_tls=False)
        except ValueError:
            return False
        return "://" in text or is_address(text, "grpc")
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdigit() and 0 < int(port) <= 65535
