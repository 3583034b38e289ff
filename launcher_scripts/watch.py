"""The loop of `action=watch`: find checkpoints, start their pipelines and follow them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from foundations.files.lock import folder_lock
from foundations.files.replace import replace_file
from inference.evaluation.bounds import parse_bounds
from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT
from inference.system.launch_environment import visible_gpus
from launcher_scripts.actions import cancel_jobs, jobs_in, read_job, record_last_run
from launcher_scripts.configuration.checks import problems_of_settings
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import decided_elsewhere, hydra_text, is_below
from launcher_scripts.configuration.effects import problems_of_effects
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import server_config
from launcher_scripts.configuration.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import SubmissionError
from launcher_scripts.rows import prepare_run
from launcher_scripts.run import Run
from launcher_scripts.trained_checkpoints import (
    TrainedCheckpoint,
    find_checkpoints,
    unknown_entries,
)
from launcher_scripts.watch_state import (
    EVALUATED,
    FAILED,
    GONE,
    PAGE_NAME,
    PASSED_OVER,
    RUNNING,
    WAITING,
    Watched,
    WatchState,
)
from stages import record
from stages.base import Stage, fingerprint
from stages.deploy import DeployStage
from stages.deploy_config import DeployConfig, problems_of_exchange
from stages.endpoint import STOP_NAME
from stages.evaluate import REPORT_NAME, EvaluateStage
from stages.progress import DamagedFileError

# Several servers may share a node, so each picks free ports.
_PORTS = ("deploy.http_port", "deploy.grpc_port", "deploy.metrics_port")
_OPENAI_PORT = "deploy.openai.port"
_DECIDED = (
    *(*_PORTS, _OPENAI_PORT, "export.model.checkpoint_path", "export.model.checkpoint_name"),
    *("export.run.results_dir", "evaluate.shared_server"),
)
_FOLDERS = (
    "export.triton_deployment.triton_model_dir", "evaluate.output_dir", "certify.output_dir",
)  # fmt: skip
_ADVANCE_S = 0.1  # poll interval of jobs on this machine
_STOPPING = "stopping; Ctrl-C again ends the jobs at once"


class RefusedError(Exception):
    """The watch cannot run; the argument is the list of problems."""


@dataclass
class Watch:
    """Runs the pipeline for every checkpoint of a training run, once the checkpoint is complete.

    Attributes:
        words: the overrides of the command line.
        compose: composes the configuration of other overrides.
    """

    config: Config
    words: Sequence[str]
    compose: Callable[[Sequence[str]], Composition]
    console: Console

    def __post_init__(self) -> None:
        self.options = self.config.watch
        made = self.config.export.triton_deployment.triton_model_dir.parent
        is_own = self.config.results_dir in made.parents
        self.state = WatchState(
            self.options,
            self.config.export.run.training_dir or Path(),
            repository=made.relative_to(self.config.results_dir) if is_own else None,
            gated=tuple(self.config.evaluate.gate),
        )
        self._last_news = time.monotonic()  # of the last change of any checkpoint
        self._checkpoints: dict[int, TrainedCheckpoint] = {}  # of the last scan, by step
        self._local_runs: dict[int, Run] = {}  # pipelines on this machine, by step
        self._server_runs: dict[int, Run] = {}  # ended pipelines whose server still runs, by step

    def problems(self) -> Iterator[str]:
        """Yield the problems that every checkpoint would have."""
        yield from problems_of_settings(self.config)
        yield from problems_of_effects(self.config)
        why = "action=watch decides it for each checkpoint"
        yield from decided_elsewhere(self.words, _DECIDED, why)
        for key in _FOLDERS:
            if not Path(folder := self.config.at(key)).is_relative_to(self.config.results_dir):
                yield (
                    f"{key}={folder} would be shared by all checkpoints; leave it out: each gets "
                    "its own folder in watch.output_dir."
                )
        if self.options.exchange:
            with suppress(ValueError):  # each pipeline reports it
                yield from problems_of_exchange(server_config(self.config))
        # The pipeline of a checkpoint that does not exist, in a folder that does not exist either.
        missing = Watched(-1, str(Path(self.state.run, "none").absolute()))
        own = (missing.source, str(self.state.results_of(missing.step)))
        _, found = self._prepared(missing)
        yield from (each for each in found if not any(part in each for part in own))

    def run(self) -> int:
        """Watch until the last step, an idle period or Ctrl-C; return the exit status.

        Raises:
            RefusedError: The configuration cannot run for any checkpoint.
            ValueError: The folder is in use, or holds the watch of another run.
        """
        if self.config.is_dry_run:
            self._scan()
            return self._report()
        folder = self.state.folder
        busy = f"watch.output_dir={folder} is in use: another action=watch runs there"
        try:
            with folder_lock(folder / ".watch.lock", busy):
                self.state.read()
                return self._loop()
        except KeyboardInterrupt:
            self.console.say("the watch ends; the same command continues it")
            return EXIT_INTERRUPTED

    def _loop(self) -> int:
        run, folder = self.state.run, self.state.folder
        waits = "" if run.is_dir() else ", which does not exist yet"
        self.console.say(f"watching {run}{waits}; state and results are in {folder}")
        for watched in self.state.in_order:
            if watched.state == RUNNING:
                self._resume(watched)
        shown_rows: list[tuple[int, str, str]] = []  # contents of the page
        next_scan_s = 0.0  # monotonic time
        try:
            while True:
                if scans_now := time.monotonic() >= next_scan_s:
                    next_scan_s = time.monotonic() + self.options.poll_s
                    self._scan()
                for watched in self.state.in_order:
                    if watched.state == RUNNING:
                        self._follow_one(watched)
                while (chosen := self._next()) is not None and self._start(chosen):
                    pass
                self._end_idle_servers()
                self.state.keep_the_best()
                has_ended = self._has_ended()
                if scans_now or has_ended:
                    self.state.write()
                    known = [(one.step, one.state, one.problem) for one in self.state.in_order]
                    if known != shown_rows or has_ended:
                        replace_file(folder / PAGE_NAME, self.state.page(has_ended=has_ended))
                        shown_rows = known
                if has_ended:
                    return self._report()
                time.sleep(_ADVANCE_S if self._local_runs else self.options.poll_s)
        finally:
            self._stop_all()

    def _report(self) -> int:
        """Print every checkpoint; return 1 if one has failed or none was ever found."""
        if not self.state.watched:
            self.console.say(
                f"no checkpoint was found in {self.state.run}; correct export.run.training_dir"
            )
            return EXIT_FAILED
        self.console.say(self.state.table(self.console))
        failed = any(one.state == FAILED for one in self.state.watched.values())
        return EXIT_FAILED if failed else EXIT_OK

    def _next(self) -> Watched | None:
        """Return the checkpoint to start now, by `watch.order`; None if none should start."""
        running = sum(one.state == RUNNING for one in self.state.watched.values())
        ready = [e for e in self.state.in_order if e.state == WAITING and not e.problem]
        if not ready or running >= self.options.parallel:
            return None
        if self.options.order != "spread":
            return ready[-1 if self.options.order == "newest" else 0]
        begun = [e.step for e in self.state.watched.values() if e.attempts]
        return max(ready, key=lambda e: (min((abs(e.step - b) for b in begun), default=0), e.step))

    def _scan(self) -> None:
        """Find new, changed and deleted checkpoints."""
        now = time.time()
        try:
            found = {one.step: one for one in find_checkpoints(self.state.run)}
            unknown = unknown_entries(self.state.run)
        except OSError as error:  # training deletes a folder, or a file system is unavailable
            if not self.state.watched:
                raise
            reason = f"{error.filename}: {error.strerror}"
            self.console.say_once(f"cannot read the run's folder, retrying: {reason}")
            return
        self._checkpoints = found
        for path in unknown:
            self.console.say_once(f"{path}: skipped, its name matches no known checkpoint layout")
        for step, checkpoint in found.items():
            watched = self.state.watched.get(step)
            if watched is None:
                watched = Watched(step, str(checkpoint.path), checkpoint.name)
                self.state.watched[step] = watched
                self._last_news = time.monotonic()
                self.console.say(f"step {step}: found {self.state.shown(watched)}")
            if watched.state == WAITING and (watched.problem or not watched.size):
                # A complete checkpoint is checked again by `_start`.
                self._update_waiting(watched, checkpoint, now)
        for watched in self.state.in_order:
            if watched.state == WAITING and watched.step not in found:
                self._finish(watched, GONE, "it was deleted before it was read")

    def _update_waiting(self, watched: Watched, checkpoint: TrainedCheckpoint, now: float) -> None:
        """Update the reason why a checkpoint waits; give up on it after `watch.patience_s`."""
        watched.path, watched.name = str(checkpoint.path), checkpoint.name
        size = ""
        with suppress(OSError):  # a file may disappear meanwhile
            size = " ".join(fingerprint(path)["sha256"] for path in checkpoint.files())
        if size != watched.size:
            watched.size, watched.changed, watched.refusal = size, now, ""
        watched.changed = min(watched.changed, now)  # the clock may have been set back
        reason = watched.refusal
        if checkpoint.missing:
            reason = f"it lacks {checkpoint.missing}"
        elif now - watched.changed < self.options.settle_s:
            reason = "its files have just changed"
        if reason and now - watched.changed > self.options.patience_s:
            self._finish(watched, PASSED_OVER, reason)
            return
        if reason != watched.problem and reason:
            self.console.say(f"step {watched.step}: waiting, {reason}")
        watched.problem = reason

    def _start(self, watched: Watched) -> bool:
        """Start the pipeline of a checkpoint that is still complete.

        Return False if no further pipeline can start now.
        """
        if watched.step in self._checkpoints:
            self._update_waiting(watched, self._checkpoints[watched.step], time.time())
        if watched.problem or watched.is_final:
            return True
        run, problems = self._prepared(watched)
        if run is None:
            self._refused(watched, problems)
            return True
        if not self._has_capacity(run):
            return False
        watched.attempts += 1
        # Its stages finished under an earlier watch that was killed; only a kept server is missing.
        if not run.jobs or (self.options.exchange and {*run.jobs} == {"deploy"}):
            self._take_figures(watched, run.config.evaluate.output_dir / REPORT_NAME, "")
            return True
        if watched.server is not None:
            self.state.held.setdefault(watched.server, []).append(watched.step)
        watched.state = RUNNING
        watched.jobs = list(run.jobs)
        watched.report = str(run.config.evaluate.output_dir / REPORT_NAME)
        self.state.write()
        run.begin()
        running = (e.step for e in self.state.in_order if e.state == RUNNING)
        record_last_run(self.config.base_results_dir, *map(self.state.results_of, running))
        if run.launcher.in_foreground:
            self._local_runs[watched.step] = run
        elif run.submit_all() != EXIT_OK:
            self._retry_or_fail(watched, "its jobs were refused")
        return True

    def _prepared(self, watched: Watched) -> tuple[Run | None, list[str]]:
        """Return the pipeline of a checkpoint, or None if it has problems; and its problems."""
        results = self.state.results_of(watched.step)
        overrides = [
            *(word for word in self.words if not is_below(word, ["action", "watch"])),
            *(f"{key}=0" for key in _PORTS),
            *[f"{_OPENAI_PORT}=0"] * self.config.deploy.openai.enabled,
            f"export.model.checkpoint_path={hydra_text(watched.path)}",
            f"export.run.results_dir={hydra_text(str(results))}",
        ]
        overrides += self._gate_overrides(results)
        overrides += self._server_overrides(watched)
        if watched.name is not None:
            overrides.append(f"export.model.checkpoint_name={hydra_text(watched.name)}")
        name = f"step {watched.step}"
        return prepare_run(self.compose(overrides), overrides, self.console, name=name)

    def _has_capacity(self, run: Run) -> bool:
        """Return whether the queue has slots, or this machine has GPUs, for a pipeline.

        Each pipeline on this machine gets its own GPUs.
        """
        slots = run.launcher.queue_slots()
        if slots is not None and slots.free < len(run.jobs):
            count = len(run.jobs)
            self.console.say_once(f"{run.name}: waiting for {count} queue slots: {slots}")
            return False
        others = [*self._local_runs.values(), *self._server_runs.values()]
        taken = [gpu for other in others if not other.has_ended() for gpu in _gpus_of(other)]
        for stage in (job.stage for job in run.jobs.values()):
            for key, server in _servers_of(stage):
                if not server.local_gpus:
                    continue
                needed = server.tp_size * server.pp_size * server.instance_count
                free = [gpu for gpu in visible_gpus() if gpu not in taken]
                if taken and needed > len(free):
                    return False
                setattr(stage, key, replace(server, visible_devices=",".join(free[:needed])))
        return True

    def _gate_overrides(self, results: Path) -> list[str]:
        """Return overrides that make the best checkpoint the baseline of relative bounds.

        They apply unless the configuration names a baseline.
        """
        bounds, _ = parse_bounds(self.config.evaluate.gate)
        is_relative = any(bound.is_relative for bound in bounds.values())
        if self.config.evaluate.baseline != "none" or not is_relative:
            return []
        best = self.state.best_checkpoint
        path = str(results / "baseline.json") if best is None else best.report
        use = "update" if best is None else "compare"
        return [f"evaluate.baseline={use}", f"evaluate.baseline_path={hydra_text(path)}"]

    def _refused(self, watched: Watched, problems: Sequence[str]) -> None:
        """Let a checkpoint with problems wait: it may still be being copied.

        Raises:
            RefusedError: No pipeline of this watch has ever started, and the problems are not the
                checkpoint's: the configuration is wrong.
        """
        has_worked = any(one.attempts for one in self.state.watched.values())
        if not has_worked and not any(watched.source in problem for problem in problems):
            raise RefusedError(problems)
        watched.refusal = watched.problem = "; ".join(problems)
        self.console.say(f"step {watched.step}: waiting, {watched.problem}")

    def _stop_all(self) -> None:
        """End the pipelines on this machine; their attempts do not count."""
        for step, run in self._local_runs.items():
            run.stop_all(_STOPPING)
            watched = self.state.watched[step]
            watched.state, watched.attempts = WAITING, watched.attempts - 1
        for run in self._server_runs.values():
            run.stop_all()
        if self._local_runs:
            self.state.write()

    def _server_overrides(self, watched: Watched) -> list[str]:
        """Return overrides by which a pipeline reuses a free server, or starts one and keeps it."""
        if not self.options.exchange:
            return []
        free = self._free_servers()
        watched.server = free[0] if free else watched.step
        if not free:
            return ["deploy.keep=true"]
        others = ",".join(name for name in self.config.stages if name != "deploy")
        place = hydra_text(str(self.state.results_of(watched.server) / "deploy"))
        return [f"stages=[{others}]", f"evaluate.shared_server={place}"]

    def _free_servers(self) -> list[int]:
        """Return the steps whose servers run and are used by no pipeline.

        Servers that have ended are removed from `held`: the weights they had mapped may be deleted.
        """
        busy = {one.server for one in self.state.watched.values() if one.state == RUNNING}
        self.state.held = {
            step: held
            for step, held in self.state.held.items()
            if step in busy or self._serves(step)
        }
        return [step for step in self.state.held if step not in busy]

    def _serves(self, step: int) -> bool:
        """Return whether the deploy job of a step's pipeline was submitted and has not ended."""
        with suppress(DamagedFileError):
            found = read_job(self.state.results_of(step), "deploy")
            return found is not None and not found.is_final
        return False

    def _end_idle_servers(self) -> None:
        """End the servers that no pipeline uses, once no checkpoint waits."""
        if any(one.state == WAITING for one in self.state.watched.values()):
            return
        for step in self._free_servers():
            if (run := self._server_runs.pop(step, None)) is not None:
                run.stop_all()
            else:
                (self.state.results_of(step) / "deploy" / STOP_NAME).touch()
        self._free_servers()

    def _resume(self, watched: Watched) -> None:
        """Resume a pipeline of an earlier watch if its jobs outlived that watch.

        Otherwise, or if the watch was killed before it submitted all jobs, the checkpoint waits.
        """
        submitted = [one for one in self._records(watched).values() if one.job_id]
        states = [one.state for one in submitted]
        is_whole = len(submitted) == len(watched.must_end)
        if self.config.cluster_type == "local":
            resumes = record.FAILED in states or (is_whole and {*states} <= {record.COMPLETED})
        else:
            resumes = is_whole and not _were_cancelled(submitted)
        if resumes:
            return
        self.console.say(
            f"step {watched.step}: its jobs ended with the earlier watch; starting again"
        )
        folder = self.state.results_of(watched.step)
        cancel_jobs(folder, jobs_in(folder), self.console)
        watched.state, watched.attempts = WAITING, watched.attempts - 1

    def _follow_one(self, watched: Watched) -> None:
        """Advance and poll the jobs of a checkpoint; take its figures once they have ended."""
        if (run := self._local_runs.get(watched.step)) is not None:
            refusal = ""
            try:
                if run.advance() is None:
                    return
            except SubmissionError as error:
                refusal = f"a job was refused: {error}"
            del self._local_runs[watched.step]
            if self.options.exchange and "deploy" in run.jobs and self._serves(watched.step):
                self._server_runs[watched.step] = run
            else:
                run.stop_all()
            watched.jobs = list(run.handles)  # stages after a failure were not started
            self.console.say(run.summary())
            if refusal:
                self._retry_or_fail(watched, refusal)
                return
        records = self._records(watched)
        found = list(records.values())
        if not found or len(found) < len(watched.must_end):  # deleted meanwhile
            folder = self.state.results_of(watched.step)
            self._retry_or_fail(watched, f"{folder} lacks the record of a job")
            return
        if not all(one.is_final for one in found):
            return
        last = records.get("evaluate") or found[-1]
        is_judged = last.exit_code in (EXIT_GATE_BREACHED, EXIT_INSUFFICIENT)
        breaches = last.error if is_judged else ""
        if last.state != record.COMPLETED and not breaches:
            causes = [f"{one.stage}: {one.error}" for one in found if one.error]
            problem = causes[0] if causes else "its jobs have failed"
            if _were_cancelled(found):
                self._finish(
                    watched, FAILED, f"not started again, its jobs were cancelled: {problem}"
                )
            else:
                self._retry_or_fail(watched, problem)
            return
        self._take_figures(watched, Path(watched.report), breaches)

    def _records(self, watched: Watched) -> dict[str, record.JobRecord]:
        """Return the jobs that must end, by stage, as far as their records or Slurm name them."""
        jobs = jobs_in(self.state.results_of(watched.step))
        by_stage = {one.stage: one for one in reversed(jobs)}
        return {name: by_stage[name] for name in watched.must_end if name in by_stage}

    def _take_figures(self, watched: Watched, report: Path, breaches: str) -> None:
        """Take the figures of a checkpoint from its report."""
        from inference.evaluation.record import read_report

        watched.report = str(report)
        try:
            metrics = read_report(report).metrics if report.is_file() else ()
        except (OSError, ValueError) as error:  # changed by another process
            self._retry_or_fail(watched, str(error))
            return
        watched.metrics = {metric.name: metric for metric in metrics}
        held = [] if watched.server is None else self.state.held.get(watched.server, [])
        if watched.step in held:  # the server has released the weights of earlier steps
            del held[: held.index(watched.step)]
        self.state.judge(watched, may_be_best=not breaches)
        self._finish(watched, EVALUATED, breaches)

    def _retry_or_fail(self, watched: Watched, problem: str) -> None:
        """Record the failure of a pipeline; retry it up to `watch.retries` times.

        If a server that another pipeline started has ended, the attempt does not count.
        """
        server = watched.server
        if server is not None and server != watched.step and not self._serves(server):
            watched.attempts -= 1
        if not all(path.exists() for path in watched.checkpoint.files()):
            self._finish(watched, GONE, "it was deleted while it was read")
        elif watched.attempts > self.options.retries:
            self._finish(watched, FAILED, problem)
        else:
            watched.state = WAITING
            self.console.say(
                f"step {watched.step}: attempt {watched.attempts} of {self.options.retries + 1} "
                f"failed: {problem}"
            )

    def _finish(self, watched: Watched, state: str, problem: str) -> None:
        watched.state, watched.problem = state, problem
        self._last_news = time.monotonic()
        shown = problem or self.state.figure(watched)
        self.console.say(": ".join(part for part in (f"step {watched.step}", state, shown) if part))

    def _has_ended(self) -> bool:
        """Return whether all work is done and `watch.until_step` or `watch.idle_s` is reached."""
        if self.state.held or any(not one.is_final for one in self.state.watched.values()):
            return False
        last = self.options.until_step
        if last is not None and any(step >= last for step in self.state.watched):
            return True
        idle = self.options.idle_s
        return idle is not None and time.monotonic() - self._last_news > idle


def _were_cancelled(jobs: Sequence[record.JobRecord]) -> bool:
    """Return whether a user cancelled a pipeline before any of its jobs failed."""
    states = {job.state for job in jobs}
    return record.CANCELLED in states and states.isdisjoint((record.FAILED, record.LOST))


def _servers_of(stage: Stage) -> Iterator[tuple[str, DeployConfig]]:
    """Yield the server that a stage runs, after the name of the stage's field that holds it."""
    if isinstance(stage, DeployStage):
        yield "config", stage.config
    if isinstance(stage, EvaluateStage) and stage.endpoint_path is None:
        yield "deploy", stage.deploy


def _gpus_of(run: Run) -> Iterator[str]:
    """Yield the GPUs of this machine that the servers of a pipeline may see."""
    for job in run.jobs.values():
        for _, server in _servers_of(job.stage):
            yield from (server.visible_devices or "").split(",")
