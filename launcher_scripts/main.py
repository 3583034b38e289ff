"""The command: compose the configuration, check every stage, run or submit them."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# While the modules below are loaded, which takes seconds from a slow disk, Ctrl-C ends the command
# without a traceback.
_AT_INTERRUPT = signal.getsignal(signal.SIGINT)
if _AT_INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

CHECKOUT = Path(__file__).resolve().parents[1]
# Started as launcher_scripts/main.py, or installed next to another distribution's `inference`.
sys.path.insert(0, str(CHECKOUT))

_NEEDED = ("hydra", "isal", "jinja2", "pydantic", "submitit")
if missing := [name for name in _NEEDED if find_spec(name) is None]:
    sys.exit(
        f"{sys.executable} lacks {', '.join(missing)}; make the environment with `make setup` and "
        f"use {CHECKOUT / '.venv' / 'bin' / 'python'}"
    )

from foundations import __version__  # noqa: E402
from launcher_scripts.configuration.arguments import (  # noqa: E402
    Arguments,
    read_arguments,
)
from launcher_scripts.configuration.compose import compose_config  # noqa: E402
from launcher_scripts.configuration.schema import KEYS, SECTIONS, Config  # noqa: E402
from launcher_scripts.configuration.settings import (  # noqa: E402
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    FULL_ERROR,
    is_set,
)
from launcher_scripts.console import Console  # noqa: E402
from stages.job_process import close_to_others  # noqa: E402
from stages.progress import DamagedFileError  # noqa: E402

signal.signal(signal.SIGINT, _AT_INTERRUPT)

if TYPE_CHECKING:
    from launcher_scripts.rows import NamedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if argv is None:
        _speak_utf8()
    close_to_others()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except DamagedFileError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of the output has left; nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if is_set(FULL_ERROR):
            raise
        sys.stderr.write(f"{error.filename or 'the output'}: {error.strerror or error}\n")
        return EXIT_FAILED


def _speak_utf8() -> None:
    """Restart Python in UTF-8 mode where the locale has another encoding; never fail at output.

    Otherwise some file names could neither be saved in the configuration of jobs nor be shown.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # for the jobs, too
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(words: Sequence[str]) -> int:
    console = Console()
    if "--version" in words:
        console.say(f"slipway-serving {__version__}")
        return EXIT_OK
    arguments = read_arguments(words)
    if arguments.wants_help:
        return _help(arguments.overrides, console, everything="all" in words)
    if arguments.multirun and arguments.shows is None:
        return _sweep(arguments, words, console)
    composition = compose_config(arguments.overrides, arguments.root)
    problems = [*arguments.problems, *composition.problems]
    if (config := composition.config) is None:
        return _report(problems)
    if arguments.shows is not None:
        return _report(problems) if problems else _show(config, arguments.shows, console)
    if config.action == "watch":
        return _watch(arguments, config, problems, console)
    if config.action not in ("run", "upgrade"):
        from launcher_scripts.actions import look_after

        return _report(problems) if problems else look_after(config, console)
    if (other := _other_replica(config)) and not problems:
        console.say(f"replica {other}: the first replica of this job runs the stages")
        return EXIT_OK
    if config.action == "upgrade":
        return _upgrade(arguments, config, problems, words, console)
    from launcher_scripts.invocation import execute, prepare_run

    run = prepare_run(composition, words, console, problems)
    if run is None:
        return _report(problems) if words else _welcome(problems, console)
    return execute([run], functools.partial(run.run_all, wait=run.config.wait))


def _help(overrides: Sequence[str], console: Console, *, everything: bool) -> int:
    """Show the help, or what the keys and sections mean that are named."""
    from launcher_scripts.configuration.diagnosis import unknown_key
    from launcher_scripts.help import help_of, help_text

    names = [each for each in overrides if "=" not in each and each not in ("help", "all")]
    if unknown := [unknown_key(each, each) for each in names if each not in (*KEYS, *SECTIONS)]:
        return _report(unknown)
    console.write(help_of(names) if names else help_text(everything=everything))
    return EXIT_OK


def _welcome(problems: Sequence[str], console: Console) -> int:
    """Say how to begin; the configuration as it is shipped only lacks a checkpoint."""
    from launcher_scripts.help import welcome

    console.say(welcome())
    others = [each for each in problems if not each.startswith("export.model.checkpoint_path=")]
    return _report(others) if others else EXIT_USAGE


def _sweep(arguments: Arguments, words: Sequence[str], console: Console) -> int:
    """Run each combination of the listed values."""
    from launcher_scripts.sweep import combinations, run_and_compare, with_folders

    wanted, problems = combinations(arguments.overrides)
    composed = {name: compose_config(each, arguments.root).config for name, each in wanted.items()}
    configs = {name: config for name, config in composed.items() if config is not None}
    problems += [
        f"--multirun with action={each}: it runs; leave one of them out."
        for each in {config.action for config in configs.values()} - {"run"}
    ]
    if problems := [*arguments.problems, *problems]:
        return _report(problems)
    return _run_rows(arguments, with_folders(wanted, configs), words, console, run_and_compare)


def _upgrade(
    arguments: Arguments,
    config: Config,
    problems: list[str],
    words: Sequence[str],
    console: Console,
) -> int:
    """Evaluate the rows of an upgrade, and judge them against the first."""
    from launcher_scripts.upgrade import (
        command_lines_of_rows,
        problems_of_upgrade,
        run_and_decide,
        wait_for_rows,
    )

    if problems := [*problems, *problems_of_upgrade(config)]:
        return _report(problems)
    if config.wait and not config.is_dry_run:
        wait_for_rows(config, console)
    wanted = command_lines_of_rows(config, arguments.overrides)
    start = functools.partial(run_and_decide, config)
    return _run_rows(arguments, wanted, words, console, start)


def _run_rows(
    arguments: Arguments,
    wanted: Mapping[str, Sequence[str]],
    words: Sequence[str],
    console: Console,
    start: Callable[[Sequence[NamedRun], Console], int],
) -> int:
    """Check all runs, then `start` them; return the exit status."""
    from launcher_scripts.invocation import execute
    from launcher_scripts.rows import prepare_rows

    compose = functools.partial(compose_config, place=arguments.root)
    rows, problems = prepare_rows(wanted, compose, words, console)
    if problems:
        return _report(problems)
    return execute([each.run for each in rows], functools.partial(start, rows, console))


def _watch(arguments: Arguments, config: Config, problems: Sequence[str], console: Console) -> int:
    """Evaluate every checkpoint of a training run, as it is written."""
    from launcher_scripts.watch import RefusedError, Watch

    compose = functools.partial(compose_config, place=arguments.root)
    watch = Watch(config, arguments.overrides, compose, console)
    if problems := [*problems, *watch.problems()]:
        return _report(problems)
    try:
        return watch.run()
    except RefusedError as error:
        return _report(error.args[0])
    except ValueError as error:
        return _report([str(error)])


def _other_replica(config: Config) -> int:
    """Return the number of this replica of a Base Command job, 0 for the first.

    An array of the type PYTORCH runs its command on every replica.
    """
    index = os.environ.get("NGC_ARRAY_INDEX", "0")
    is_replica = config.cluster_type == "bcp" and "NGC_JOB_ID" in os.environ and index.isdigit()
    return int(index) if is_replica else 0


def _show(config: Config, section: str, console: Console) -> int:
    """Show the composed configuration, or a section of it."""
    from launcher_scripts.configuration.diagnosis import unknown_key
    from launcher_scripts.job_folder import as_yaml

    if section and section not in SECTIONS:
        return _report([unknown_key(f"--package {section}", section)])
    console.write(as_yaml(config.at(section) if section else config))
    return EXIT_OK


def _report(problems: Sequence[str]) -> int:
    Console(sys.stderr).refuse(problems)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
