"""The command: compose the configuration, check every stage, run or submit them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parents[1]
if str(CHECKOUT) not in sys.path:  # started as launcher_scripts/main.py
    sys.path.insert(0, str(CHECKOUT))

from launcher_scripts.arguments import Arguments, read_arguments  # noqa: E402
from launcher_scripts.compose import CONFIG_DIR, CONFIG_NAME, compose_config, register  # noqa: E402
from launcher_scripts.config import Config  # noqa: E402
from launcher_scripts.console import Console  # noqa: E402

if TYPE_CHECKING:
    from launcher_scripts.run import Run

EXIT_FAILED, EXIT_USAGE = 1, 2
_TRUTHY = ("true", "t", "1")
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = read_arguments(words)
    console = Console()
    if arguments.wants_help:
        from launcher_scripts.help import help_text

        console.say(help_text())
        return 0
    composition = compose_config(
        arguments.overrides,
        config_dir=arguments.config_dir or CONFIG_DIR,
        config_name=arguments.config_name or CONFIG_NAME,
        extra_dir=arguments.extra_dir,
    )
    problems = [*arguments.problems, *composition.problems]
    if arguments.hydra_flags:
        return _report(problems) if problems else _answer_by_hydra(arguments)
    if arguments.multirun:
        problems.append("--multirun is not available in this version; run one value at a time.")
    if composition.config is None:
        return _report(problems)
    if composition.config.action != "run" and not problems:
        from launcher_scripts.actions import look_after

        return look_after(composition.config, console)
    session = _Session(composition.config, composition.resolved, words, console)
    run = session.prepare(problems)
    return _report(problems) if run is None else session.execute(run)


@dataclass(frozen=True)
class _Session:
    """One command line with its configuration, from the plan to the exit status."""

    config: Config
    resolved: Mapping[str, Any]
    words: Sequence[str]
    console: Console

    def prepare(self, problems: list[str]) -> Run | None:
        """Return the jobs to run; add what stands against them to `problems`."""
        from launcher_scripts import job_folder
        from launcher_scripts.launchers import make_launcher
        from launcher_scripts.pipeline import make_plan
        from launcher_scripts.run import Run
        from launcher_scripts.stage_configs import Context

        config = self.config
        command = shlex.join(["python", "main.py", *self.words])
        revision = job_folder.git_revision(CHECKOUT)
        plan = make_plan(config, Context(command=command, git_revision=revision))
        problems += [*plan.problems, *_secrets(config), *_places(config)]
        try:
            launcher = make_launcher(config)
            problems += launcher.check([each.stage for each in plan.to_run])
        except ValueError as error:
            problems.append(str(error))
        if problems:
            return None
        finished = [f"{each.name}: {each.reason}" for each in plan.stages if not each.runs]
        for note in (*plan.notes, *_ignored(config), *finished):
            self.console.say(note)
        jobs = {
            each.name: job_folder.make_job(each.stage, config, self.resolved, git_revision=revision)
            for each in plan.to_run
        }
        return Run(launcher, self.console, plan.stages, jobs, keep_serving=config.deploy.keep)

    def execute(self, run: Run) -> int:
        """Write the jobs' files, start the jobs and return the exit status."""
        from launcher_scripts import job_folder
        from launcher_scripts.actions import note_last_run
        from launcher_scripts.stage_configs import results_dir
        from stages import record

        try:
            if run.jobs:
                arguments = [sys.executable, str(CHECKOUT / "main.py"), *self.words]
                results = results_dir(self.config)
                job_folder.note_command(results, arguments, at=record.now())
            if self.config.dry_run or _is_set("NEMO_LAUNCHER_DEBUG"):
                run.render()
                return 0
            for signum in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, _interrupt)
            note_last_run(Path(self.config.base_results_dir), results_dir(self.config))
            return run.run_all(wait=self.config.wait)
        except BrokenPipeError:
            return EXIT_FAILED  # whoever read the output has left
        except OSError as error:
            if self.config.debug or _is_set("HYDRA_FULL_ERROR"):
                raise
            sys.stderr.write(
                f"{error.filename or self.config.base_results_dir}: {error.strerror}\n"
            )
            return EXIT_FAILED


def _answer_by_hydra(arguments: Arguments) -> int:
    """Let Hydra print the configuration, its own help and the like."""
    import hydra

    register()
    root = arguments.config_dir or CONFIG_DIR
    extra = [f"--config-dir={arguments.extra_dir}"] if arguments.extra_dir else []
    sys.argv = [sys.argv[0], *arguments.hydra_flags, *extra, *arguments.overrides]
    hydra.main(
        version_base="1.3",
        config_path=str(root),
        config_name=arguments.config_name or CONFIG_NAME,
    )(_nothing)()
    return 0


def _nothing(config: object) -> None:
    """Stand in for the task: Hydra answers before it would be called."""
    del config


def _report(problems: Sequence[str]) -> int:
    """Print every problem and return the exit status."""
    unique = list(dict.fromkeys(problems))
    count = "one problem" if len(unique) == 1 else f"{len(unique)} problems"
    sys.stderr.write(f"{count} found; nothing was started:\n")
    for problem in unique:
        sys.stderr.write(f"  - {problem}\n")
    return EXIT_USAGE


def _secrets(config: Config) -> list[str]:
    """Refuse secrets in clear text: the configuration is saved, and scripts are."""
    return [
        f"env_vars.{name} holds a secret in clear text, which would be written to disk; export "
        f"{name} in the environment instead: jobs inherit it."
        for name, value in config.env_vars.items()
        if value is not None and any(word in name.upper() for word in _SECRET_WORDS)
    ]


def _places(config: Config) -> list[str]:
    """Return what is wrong with the folders that everything is derived from."""
    problems = []
    path = Path(config.launcher_scripts_path)
    if path.name != "launcher_scripts":
        problems.append(
            f"launcher_scripts_path={path} does not end in /launcher_scripts; give the folder of "
            "that name in your checkout."
        )
    results = Path(config.base_results_dir)
    there = next(each for each in (results, *results.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        problems.append(
            f"base_results_dir={results}: {there} cannot be written to; choose a folder of yours."
        )
    return problems


def _ignored(config: Config) -> list[str]:
    """Say which settings are accepted but change nothing."""
    given = {
        "wandb_api_key_file": config.wandb_api_key_file,
        "numa_mapping": config.numa_mapping,
        "api_log": config.api_log,
        "ci_test": config.ci_test,
    }
    return [
        f"{name} is accepted for compatibility and changes nothing here"
        for name, value in given.items()
        if value
    ]


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _TRUTHY


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End in order, as on Ctrl-C."""
    del frame
    raise KeyboardInterrupt(signal.Signals(signum).name)


if __name__ == "__main__":
    sys.exit(main())
