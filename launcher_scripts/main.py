"""The command: compose the configuration, check every stage, run or submit them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

# Loading the modules below takes seconds from a slow disk. Until then, Ctrl-C ends the command
# without a traceback.
_AT_INTERRUPT = signal.getsignal(signal.SIGINT)
if _AT_INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

CHECKOUT = Path(__file__).resolve().parents[1]
# Needed when started as launcher_scripts/main.py, or when another distribution has an `inference`.
sys.path.insert(0, str(CHECKOUT))

_NEEDED = ("hydra", "isal", "jinja2", "pydantic", "submitit")
if missing := [name for name in _NEEDED if find_spec(name) is None]:
    sys.exit(
        f"{sys.executable} lacks {', '.join(missing)}; make the environment with `make setup` and "
        f"use {CHECKOUT / '.venv' / 'bin' / 'python'}"
    )

from foundations import __version__  # noqa: E402
from foundations.commands import accept_any_text  # noqa: E402
from foundations.files.disk import full_disk  # noqa: E402
from launcher_scripts.configuration.arguments import Arguments, read_arguments  # noqa: E402
from launcher_scripts.configuration.compose import (  # noqa: E402
    Composition,
    compose_config,
)
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
from stages.job_process import restrict_umask  # noqa: E402
from stages.progress import DamagedFileError  # noqa: E402

signal.signal(signal.SIGINT, _AT_INTERRUPT)

if TYPE_CHECKING:
    from launcher_scripts.run import Run

    Start: TypeAlias = Callable[[Sequence[Run], Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if argv is None:
        _speak_utf8()
    restrict_umask()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(signum, signal.default_int_handler)  # handled like Ctrl-C
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except DamagedFileError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of the output is gone; nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if is_set(FULL_ERROR):
            raise
        plain = f"{error.filename or 'the output'}: {error.strerror or error}"
        sys.stderr.write(f"{full_disk(error, Path.cwd()) or plain}\n")
        return EXIT_FAILED


def _speak_utf8() -> None:
    """Restart Python in UTF-8 mode if the locale has another encoding; never fail on output.

    In another encoding, some file names could neither be saved in job configurations nor printed.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # inherited by the jobs
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    accept_any_text()


def _run(words: Sequence[str]) -> int:
    console = Console()
    if "--version" in words:
        console.say(f"slipway-serving {__version__}")
        return EXIT_OK
    try:
        arguments = read_arguments(words)
    except ValueError as error:
        return _report([str(error)])
    if arguments.wants_help:
        return _help(arguments.overrides, console, everything="all" in words)
    compose = partial(compose_config, place=arguments.root)
    if arguments.multirun and not arguments.shows:
        from launcher_scripts.sweep import compositions_of_sweep

        found, problems = compositions_of_sweep(arguments.overrides, compose)
        return _start(found, words, console, [*arguments.problems, *problems])
    composition = compose(arguments.overrides)
    problems = [*arguments.problems, *composition.problems]
    if (config := composition.config) is None:
        return _report(problems)
    if arguments.shows:
        from launcher_scripts.job_folder import as_yaml

        if problems:
            return _report(problems)
        console.write(as_yaml(config))
        return EXIT_OK
    if config.action == "watch":
        return _watch(config, arguments.overrides, compose, problems, console)
    if config.action not in ("run", "upgrade"):
        from launcher_scripts.actions import run_action
        from launcher_scripts.configuration.diagnosis import decided_elsewhere

        ignored = ["stages"] * (config.action == "cancel")
        why = "action=cancel ends every job of the run"
        problems += decided_elsewhere(arguments.overrides, ignored, why)
        return _report(problems) if problems else run_action(config, console, arguments.overrides)
    if (other := _replica_index(config)) and not problems:
        console.say(f"replica {other}: the first replica of this job runs the stages")
        return EXIT_OK
    if config.action == "upgrade":
        return _upgrade(config, words, console, arguments, problems)
    return _start({"": composition}, words, console, arguments.problems)


def _upgrade(
    config: Config,
    words: Sequence[str],
    console: Console,
    arguments: Arguments,
    problems: Sequence[str],
) -> int:
    from launcher_scripts.upgrade import (
        command_lines_of_rows,
        problems_of_upgrade,
        run_and_decide,
        wait_for_rows,
    )

    problems = [*problems, *problems_of_upgrade(config, arguments.overrides)]
    rows = command_lines_of_rows(config, arguments.overrides)
    if not rows:
        return _report(problems)
    found = {name: compose_config(each, arguments.root) for name, each in rows.items()}
    is_wrong = problems or any(each.problems for each in found.values())
    if config.wait and not (config.is_dry_run or is_wrong):
        wait_for_rows(config, console)
    start = partial(run_and_decide, config)
    return _start(found, words, console, problems, start)


def _start(
    compositions: Mapping[str, Composition],
    words: Sequence[str],
    console: Console,
    problems: Sequence[str],
    start: Start | None = None,
) -> int:
    """Check the runs of these configurations, then start them; return the exit status.

    A call without arguments gets the way to begin instead of a missing checkpoint.
    """
    from launcher_scripts.help import welcome
    from launcher_scripts.rows import execute, prepare_rows, run_rows

    rows, wrong = prepare_rows(compositions, words, console, problems)
    if any(each.startswith("export.model.checkpoint_path=") for each in wrong) and not words:
        console.say(welcome())
        return EXIT_USAGE
    if wrong:
        return _report(wrong)
    start = start or partial(run_rows, wait=rows[0].config.wait)
    return execute(rows, console, start)


def _help(overrides: Sequence[str], console: Console, *, everything: bool) -> int:
    """Show the help, or the meaning of the keys and sections named in `overrides`."""
    from launcher_scripts.configuration.diagnosis import unknown_key
    from launcher_scripts.help import help_of, help_text

    names = [
        override
        for override in overrides
        if "=" not in override and override not in ("help", "all")
    ]
    if unknown := [unknown_key(name, name) for name in names if name not in (*KEYS, *SECTIONS)]:
        return _report(unknown)
    console.write(help_of(names) if names else help_text(everything=everything))
    return EXIT_OK


def _watch(
    config: Config,
    overrides: Sequence[str],
    compose: Callable[[Sequence[str]], Composition],
    problems: Sequence[str],
    console: Console,
) -> int:
    """Run `action=watch`: evaluate each checkpoint of a training run once it is written."""
    from launcher_scripts.watch import RefusedError, Watch

    watch = Watch(config, overrides, compose, console)
    if problems := [*problems, *watch.problems()]:
        return _report(problems)
    try:
        return watch.run()
    except RefusedError as error:
        return _report(error.args[0])
    except ValueError as error:
        return _report([str(error)])


def _replica_index(config: Config) -> int:
    """Return the index of this Base Command replica: 0 for the first, or outside Base Command.

    An array of type PYTORCH runs the command on every replica.
    """
    index = os.environ.get("NGC_ARRAY_INDEX", "0")
    is_replica = config.cluster_type == "bcp" and "NGC_JOB_ID" in os.environ and index.isdigit()
    return int(index) if is_replica else 0


def _report(problems: Sequence[str]) -> int:
    Console(sys.stderr).refuse(problems)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
