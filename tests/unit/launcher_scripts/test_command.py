"""The command as a whole: what it refuses, what it prints, how it exits."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from foundations import __version__
from foundations.files.lock import folder_lock
from launcher_scripts import job_folder
from launcher_scripts.actions import clock, run_action
from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.schema import KEYS, Config
from launcher_scripts.console import Console
from launcher_scripts.main import main
from stages.record import JobRecord, read_record, write_record
from tests.integration.command import FREE_PORTS
from tests.unit.launcher_scripts.test_run import make_run, wait_for
from tests.unit.launcher_scripts.toy_stages import WriteStage, settings

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = "export=gpt3/sample"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "nothing was started" in seen.err
    return seen.err


def action(name: str, base: Path, *words: str) -> Config:
    config = compose_config(
        read_arguments([f"action={name}", f"base_results_dir={base}", *words]).overrides
    ).config
    assert config is not None
    return config


def test_problems_of_keys_and_of_stages_come_in_one_list(tmp_path, capsys):
    text = refused(
        capsys, SAMPLE, f"base_results_dir={tmp_path}/r", "stages=[export,evauate]",
        "export.model.weight_data_typ=fp32", "export.model.tensor_model_parallel_size=3",
    )  # fmt: skip
    assert "did you mean evaluate?" in text
    assert "did you mean export.model.weight_data_type?" in text
    assert "does not divide head_num=8" in text
    assert not (tmp_path / "r").exists()


def test_values_that_no_type_can_refuse_are_refused_with_their_keys(tmp_path, capsys):
    text = refused(
        capsys, SAMPLE, "base_results_dir=/proc/x", "watch.output_dir=/dev/null/x",
        "export.triton_deployment.parameters={max_lanes: x, kv_cache_bytes: -1, nonsense: 1}",
        "export.triton_deployment.parameters.device=gpu", "export.run.model_type=GPT",
        "export.triton_deployment.parameters.threads=true",
        "container_mounts=[/a:b:c:d,/a:b,x,/ok:/there:ro,3]", "cluster.job_name_prefix='a b'",
    )  # fmt: skip
    for each in (
        "base_results_dir=/proc/x: /proc cannot be written to (No such file or directory)",
        "watch.output_dir=/dev/null/x: /dev/null is not a folder",
        "export.triton_deployment.parameters.max_lanes=x must be a whole number from 1 to 65536",
        "export.triton_deployment.parameters.kv_cache_bytes=-1 must be a whole number from 1",
        "export.triton_deployment.parameters.nonsense=1 is unknown; known parameters: ",
        "export.triton_deployment.parameters.device=gpu must be one of auto, cpu, cuda",
        "export.triton_deployment.parameters.threads=true must be a whole number from 1 to 4096",
        "export.run.model_type=GPT is unknown (did you mean gpt?); use gpt3",
        "'/a:b:c:d', '/a:b', 'x', 3: not a mount; write /path, ",
        "cluster.job_name_prefix=a b: is part of file names; use at most 64 letters",
    ):
        assert each in text
    assert "'/ok" not in text


def test_keys_without_effect_are_reported_when_they_are_set(tmp_path, capsys):
    words = (
        "export.benchmark.input_len=61", "export.model.load_checkpoints_to_cpu=true",
        "export.triton_deployment.enable_custom_all_reduce=1", "ci_test=true",
        "wandb_api_key_file=/k",
    )  # fmt: skip
    plain = (SAMPLE, f"base_results_dir={tmp_path}", "dry_run=true", "stages=[convert]")
    assert main([*plain, *words]) == 0
    seen = capsys.readouterr().out
    for each in words:
        key = each.partition("=")[0]
        assert re.search(f"^without effect: (.*, )?{key}[ ,]", seen, re.MULTILINE), key
    assert main(plain) == 0
    assert "without effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("export.run.name=a/b", "export.run.name=a/b: cannot be part of names of files and jobs"),
        (
            "deploy.name=a\nb",
            r"deploy.name='a\nb': line breaks and control characters are not allowed",
        ),
        ("evaluate.name=", "evaluate.name=: is empty"),
        ("cluster.job_name_prefix=a/", "cluster.job_name_prefix=a/: is part of file names"),
        ("env_vars.A-B=1", "env_vars.A-B: A-B is not a valid variable name"),
        ("env_vars.A={b: 1}", "env_vars.A={'b': 1}: expected a single value"),
        ("env_vars.SLIPWAY_JOB_ID=1", "env_vars.SLIPWAY_JOB_ID identifies each job"),
        ("env_vars.HF_TOKEN=hf_abcdef", "env_vars.HF_TOKEN holds a secret"),
        ("launcher_scripts_path=/tmp", "does not end in /launcher_scripts"),
        ("export=gpt3/samplo", "one problem found"),
        (f"base_results_dir=/tmp/{'a' * 300}", "is longer than 255 bytes"),
        ("cluster=bcm", "needs sbatch, which is not on PATH"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    tmp_path,
    capsys,
    monkeypatch,
    word,
    reported,
):
    monkeypatch.setenv("PATH", "")
    text = refused(capsys, SAMPLE, f"base_results_dir={tmp_path}", word)
    assert reported in text
    assert "hf_abcdef" not in text
    assert not any(tmp_path.iterdir())


def test_launcher_scripts_path_may_be_the_folder_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "launcher_scripts")
    words = [SAMPLE, "stages=[convert]", "dry_run=true", f"base_results_dir={tmp_path}"]
    assert main([*words, "launcher_scripts_path=."]) == 0


def test_archive_that_cannot_be_used_is_named_with_its_key(tmp_path, capsys):
    path = tmp_path / "model.nemo"
    path.write_text("no archive")
    words = (f"base_results_dir={tmp_path}/r", f"export.model.checkpoint_path={path}")
    text = refused(capsys, SAMPLE, *words, "stages=[export]")
    assert f"  - export.model.checkpoint_path={path} is not a checkpoint of a known" in text
    assert not (tmp_path / "r").exists()


def test_taken_port_is_reported_before_anything_is_converted(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = (SAMPLE, f"base_results_dir={tmp_path}", "stages=[deploy]")
        text = refused(capsys, *words, f"deploy.grpc_port={port}")
    assert f"deploy.grpc_port={port} is in use by process {os.getpid()}" in text
    assert not any(tmp_path.iterdir())


def test_names_of_files_work_in_every_locale(tmp_path):
    command = [
        sys.executable, "main.py", SAMPLE, f"base_results_dir={tmp_path}/\xe9", "stages=[convert]",
        "dry_run=true",
    ]  # fmt: skip
    narrow = {
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | narrow, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "\xe9" / "gpt_books_5m").is_dir()


def test_debug_switch_of_the_launcher_is_a_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NEMO_LAUNCHER_DEBUG", "yes")
    monkeypatch.setenv("PATH", "")
    for cluster in ("local", "bcm", "bcp"):
        words = [SAMPLE, f"cluster={cluster}", f"base_results_dir={tmp_path}", "stages=[convert]"]
        assert main(words) == 0
        assert "one job written, nothing started" in capsys.readouterr().out
    assert not list(tmp_path.rglob("job.json"))


def test_dry_run_is_not_repeated_by_the_saved_configuration(tmp_path, capsys):
    assert main([SAMPLE, f"base_results_dir={tmp_path}", "dry_run=true", "cluster=bcm"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --dependency=afterok:10001,singleton" in shown
    (saved,) = tmp_path.rglob("deploy_*_config.yaml")
    assert "dry_run: false" in saved.read_text()


def test_status_shows_every_job_of_the_last_run(tmp_path, capsys):
    (tmp_path / "last_run.json").write_text(json.dumps({"results_dirs": [str(tmp_path / "run")]}))
    record = JobRecord("12", "convert", "c", "failed", error="no space left", exit_code=1)
    write_record(tmp_path / "run" / "convert" / "job.json", record)
    assert run_action(action("status", tmp_path), Console()) == 1
    shown = capsys.readouterr().out
    assert "convert  12   failed" in shown
    assert "convert: no space left" in shown


def test_a_level_of_logs_that_no_job_would_take_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEMO_LAUNCHER_LOG_LEVEL", "loud")
    text = refused(capsys, SAMPLE, f"base_results_dir={tmp_path}", "stages=[convert]")
    assert "NEMO_LAUNCHER_LOG_LEVEL=loud is not a log level" in text


def test_a_dry_run_cancels_nothing(tmp_path, capsys):
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "convert/submitit/12"]
    ) as process:
        record = JobRecord(
            "12", "convert", "c", "running", host=socket.gethostname(), process=process.pid
        )
        write_record(tmp_path / "convert" / "job.json", record)
        words = ["action=cancel", f"run_dir={tmp_path}"]
        assert main([*words, "dry_run=true"]) == 0
        assert "convert (job 12) would be cancelled" in capsys.readouterr().out
        assert process.poll() is None
        process.kill()


def test_an_action_is_not_taken_on_another_run_than_the_one_that_is_named(tmp_path, capsys):
    (tmp_path / "last_run.json").write_text(json.dumps({"results_dirs": [str(tmp_path / "run")]}))
    record = JobRecord("12", "convert", "c", "completed")
    write_record(tmp_path / "run" / "convert" / "job.json", record)
    base = f"base_results_dir={tmp_path}"
    assert main(["action=cancel", base, f"export.run.results_dir={tmp_path}/other"]) == 2
    assert f"{tmp_path}/other holds no jobs" in capsys.readouterr().out
    assert "stages=[convert]: action=cancel ends" in refused(
        capsys, "action=cancel", base, "stages=[convert]", f"run_dir={tmp_path}/run"
    )
    assert main(["action=status", base, SAMPLE, f"export.run.results_dir={tmp_path}/run"]) == 0
    assert main(["action=status", base, "stages=[convert]"]) == 0


def test_status_shows_the_log_and_the_progress_of_a_job(tmp_path, capsys):
    folder = tmp_path / "convert"
    write_record(
        folder / "job.json",
        JobRecord(
            "12", "convert", "c", "running", host="elsewhere", log=f"{folder}/c.out",
            started_at="2024-01-01T00:00:00+00:00",
        ),
    )  # fmt: skip
    (folder / "progress.json").write_text('{"phase": "reading the checkpoint"}')
    (folder / "c.out").touch()
    assert run_action(action("status", tmp_path, f"run_dir={tmp_path}"), Console()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:4])
    assert f"convert: log {folder}/c.out" in lines
    assert "convert: reading the checkpoint" in lines


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_pipe", [True, False])
def test_status_names_a_damaged_file_next_to_a_job_that_runs(is_pipe, tmp_path, capsys):
    folder, name = tmp_path / "deploy", "progress.json"
    write_record(folder / "job.json", JobRecord("12", "deploy", "d", "running", host="elsewhere"))
    if is_pipe:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text("{")
    assert run_action(action("status", tmp_path, f"run_dir={tmp_path}"), Console()) == 0
    shown = capsys.readouterr().out
    assert "12   running" in shown
    assert f"deploy: {folder / name} is damaged (" in shown
    assert "deploy: no log" in shown


def test_status_names_a_file_that_cannot_be_read_and_shows_the_other_jobs(tmp_path, capsys):
    for stage in ("convert", "deploy"):
        record = JobRecord("12", stage, stage, "running", host="elsewhere")
        write_record(tmp_path / stage / "job.json", record)
    damaged = (tmp_path / "export" / "job.json", tmp_path / "deploy" / "progress.json")
    for path in damaged:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(path.name)
    assert run_action(action("status", tmp_path, f"run_dir={tmp_path}"), Console()) == 1
    shown = capsys.readouterr().out
    assert "convert  12   running" in shown
    assert "deploy   12   running" in shown
    for path in damaged:
        assert f"{path} cannot be read (Too many levels of symbolic links); make it" in shown


def test_process_that_only_has_the_number_of_the_job_is_left_alone(tmp_path, capsys):
    other = subprocess.Popen(["sleep", "60"])
    try:
        record = JobRecord(
            "12", "convert", "c", "running", host=socket.gethostname(), process=other.pid
        )
        write_record(tmp_path / "convert" / "job.json", record)
        assert run_action(action("cancel", tmp_path, f"run_dir={tmp_path}"), Console()) == 0
        assert other.poll() is None
        assert "nothing to cancel" in capsys.readouterr().out
        ended = read_record(tmp_path / "convert" / "job.json")
        assert ended is not None
        assert ended.state == "lost"
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("state", [None, "{", "completed", "running"])
def test_job_that_holds_its_lock_is_not_replaced_whatever_its_record_says(state, tmp_path, capsys):
    path = tmp_path / "convert" / "job.json"
    if state in ("completed", "running"):
        write_record(path, JobRecord("0_0_7", "convert", "c", state, "local", host="elsewhere"))
    words = [SAMPLE, "stages=[convert]", f"export.run.results_dir={tmp_path}", "dry_run=true"]
    with folder_lock(path.with_name(".alive-0_0_7.lock"), ""):
        if state == "{":
            path.write_text(state)
        before = path.read_bytes() if state else b""
        assert "convert: job 0_0_7 " in refused(capsys, *words)
        assert run_action(action("cancel", tmp_path, f"run_dir={tmp_path}"), Console()) == 1
    assert "convert (job 0_0_7) cannot be cancelled" in capsys.readouterr().out
    assert main(words) == 0
    assert not state or path.read_bytes() == before  # a dry run moves no record


def test_cancel_without_slurm_says_why_it_cannot(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    write_record(
        tmp_path / "convert" / "job.json",
        JobRecord("12", "convert", "c", "running", cluster="bcm"),
    )
    assert run_action(action("cancel", tmp_path, f"run_dir={tmp_path}"), Console()) == 1
    shown = capsys.readouterr().out
    assert "convert (job 12) cannot be cancelled: scancel is unavailable here" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00:00"), (59.6, "0:01:00"), (7325, "2:02:05"), (90061, "1-1:01:01")],
)
def test_elapsed_time_is_shown_as_a_clock(seconds, text):
    assert clock(seconds) == text


def test_a_closed_output_is_not_an_error(tmp_path):
    line = f"{shlex.quote(sys.executable)} main.py --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("Slipway")
    assert done.stderr == ""


@pytest.mark.parametrize("content", ["{", "{}", "[]", "a folder", "a loop"])
@pytest.mark.parametrize("name", ["last_run.json", "export/job.json"])
def test_damaged_files_of_a_run_are_named_with_the_way_out(tmp_path, capsys, name, content):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content == "a folder":
        path.mkdir()
    elif content == "a loop":
        path.symlink_to(path.name)
    else:
        path.write_text(content)
    write_record(tmp_path / "deploy" / "job.json", JobRecord("12", "deploy", "d", "completed"))
    where = "base_results_dir" if name == "last_run.json" else "run_dir"
    assert main(["action=status", f"{where}={tmp_path}"]) == 1
    shown = "".join(capsys.readouterr())
    (line,) = (each for each in shown.splitlines() if each.startswith(f"{path}"))
    if not content.startswith("a "):
        assert "is damaged (" in line
        assert "delete the file" in line
        assert ("deploy  12" in shown) == (where == "run_dir")  # other jobs are looked after


def test_a_damaged_marker_hides_no_other_problem(tmp_path, capsys):
    marker = tmp_path / "model_repo" / "fastertransformer" / "1" / "2-gpu.convert.json"
    marker.parent.mkdir(parents=True)
    marker.write_text("{")
    words = ["evaluate.gate.foo.min=1", "evaluate.lambada.data_path=null", f"data_dir={tmp_path}"]
    said = refused(capsys, SAMPLE, f"export.run.results_dir={tmp_path}", *words, *FREE_PORTS)
    for part in (f"{marker} is damaged (", "evaluate.gate.foo bounds", "the passages of LAMBADA"):
        assert part in said


def test_a_file_of_state_beyond_all_memory_is_not_read(tmp_path, capsys):
    (tmp_path / "last_run.json").touch()
    os.truncate(tmp_path / "last_run.json", 1 << 40)
    assert main(["action=status", f"base_results_dir={tmp_path}"]) == 1
    assert f"{tmp_path}/last_run.json is damaged (it has " in capsys.readouterr().err


def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "hydra.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "main.py", "action=status"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == b""


def test_a_place_that_takes_no_file_is_named_once(tmp_path, capsys):
    results, other = tmp_path / "results", tmp_path / "other"
    results.touch()
    other.touch()
    said = refused(capsys, SAMPLE, f"base_results_dir={results}", f"watch.output_dir={other}")
    assert said.count("is not a folder; choose a folder of yours") == 2
    assert f"base_results_dir={results}: " in said
    assert f"watch.output_dir={other}: " in said
    repository = f"export.triton_deployment.triton_model_dir={other}/x"
    base = f"base_results_dir={tmp_path}"
    assert "one problem found" in refused(capsys, SAMPLE, base, repository, "stages=[convert]")


@pytest.mark.parametrize("dry_run", ["false", "true"])
def test_a_second_server_in_the_folder_of_one_that_serves_is_refused(tmp_path, capsys, dry_run):
    folder = tmp_path / "deploy"
    # A job is known by its folder, which its process was started with.
    wait = [sys.executable, "-c", "input()", str(folder / "submitit" / "7")]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as process:
        here = socket.gethostname()
        serving = JobRecord("7", "deploy", "deploy", "running", "local", host=here)
        write_record(folder / "job.json", replace(serving, process=process.pid))
        words = ["stages=[deploy]", f"export.run.results_dir={tmp_path}", f"dry_run={dry_run}"]
        said = refused(capsys, SAMPLE, *words)
        assert f"deploy: job 7 (process {process.pid}) is running in {folder}; end it with" in said
        assert process.stdin is not None
        process.stdin.close()
    assert main([SAMPLE, *words[:2], "dry_run=true"]) == 0


@pytest.mark.parametrize("words", [["run_dir="], ["foo"], ["deploy.http_port=x"]])
def test_a_wrong_word_of_an_action_is_the_only_problem(words, capsys):
    assert "one problem found" in refused(capsys, "action=status", *words)


def test_the_default_in_place_of_a_refused_value_is_no_problem(tmp_path, capsys):
    base = f"base_results_dir={tmp_path}"
    for words in (["export.model.checkpoint_path=", "stages=[convert]"], ["~stages"]):
        assert "one problem found" in refused(capsys, base, *words, *FREE_PORTS)
    ports = ["deploy.http_port=70000", "deploy.grpc_port=8000"]  # 8000 is the default of the first
    assert "must differ" not in refused(capsys, base, SAMPLE, *ports)


def test_status_without_any_run_names_the_remedy(tmp_path, capsys):
    assert run_action(action("status", tmp_path), Console()) == 2
    assert "run_dir=<folder>" in capsys.readouterr().out


def test_logs_are_printed_to_the_end(tmp_path, capsys):
    class NamedStage(WriteStage):
        name = "convert"

    run, _ = make_run(NamedStage(settings(tmp_path, "convert")))
    assert run.run_all(wait=False) == 0
    assert run_action(action("logs", tmp_path, f"run_dir={tmp_path}"), Console()) == 0
    assert "working" in capsys.readouterr().out


def test_cancel_ends_a_running_job_of_another_command(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from tests.unit.launcher_scripts.test_run import make_run\n"
        "from tests.unit.launcher_scripts.toy_stages import SleepStage, settings\n"
        "SleepStage.name = 'convert'\n"
        "stage = SleepStage(settings(Path(sys.argv[3]), 'convert'))\n"
        "sys.exit(make_run(stage)[0].run_all(wait=False))\n"
    )
    here = str(Path(__file__).parent)
    command = subprocess.Popen([sys.executable, "-c", program, str(ROOT), here, str(tmp_path)])
    try:
        wait_for(tmp_path / "out" / "target.pid")
        config = action("cancel", tmp_path, f"run_dir={tmp_path}")
        assert run_action(config, Console()) == 0
        assert command.wait(120) == 1
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
    record = read_record(tmp_path / "convert" / "job.json")
    assert record is not None
    assert record.state == "cancelled"


def test_full_disk_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_folder, "record_command", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
    words = [f"base_results_dir={tmp_path}", f"export.run.results_dir={tmp_path}/r", "dry_run=true"]
    assert main([SAMPLE, *words, "stages=[convert]"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the disk mounted at ")
    assert f"{tmp_path}/r cannot be written" in line


def test_help_fits_on_a_screen_and_help_all_has_every_key(
    capsys,
):
    short, long = (
        (main(words), capsys.readouterr().out.splitlines())[1]
        for words in (["--help"], ["--help", "all"])
    )
    assert 24 <= len(short) <= 40
    assert max(map(len, short)) <= 100
    assert long[: len(short)] == short
    shown = "\n".join(long[len(short) :])
    leaves = {key.name.rpartition(".")[2] for key in KEYS.values()}
    assert [leaf for leaf in leaves if not re.search(rf"^    {leaf}\b", shown, re.MULTILINE)] == []
    assert "[Recreate, RollingUpdate]" in shown  # as they are written


def test_first_call_without_arguments_says_what_to_type(
    capsys,
):
    assert main([]) == 2
    shown, errors = capsys.readouterr()
    assert "python main.py export=gpt3/sample\x20" in shown
    assert "checkpoint_path" not in errors  # no user wrote the path that is missing


def test_other_users_may_not_change_files_of_a_run_whatever_the_umask(tmp_path):
    before = os.umask(0)
    for umask, forbidden in ((0, 0o022), (0o077, 0o077)):
        results = tmp_path / str(umask)
        os.umask(umask)
        try:
            assert main([SAMPLE, "stages=[convert]", f"base_results_dir={results}"]) == 0
        finally:
            os.umask(before)
        made = [path for path in results.rglob("*") if not path.is_symlink()]
        assert any(path.suffix == ".pkl" for path in made)
        assert [path for path in made if path.stat().st_mode & forbidden] == []


def test_the_version_is_the_projects_own(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slipway-serving {__version__}\n"


def test_help_of_a_key_is_its_meaning_and_of_another_a_refusal(capsys):
    assert main(["--help", "deploy.http_port"]) == 0
    shown = capsys.readouterr().out
    assert "http_port" in shown
    assert "grpc_port" not in shown
    assert main(["--help", "deploy.openai"]) == 0
    assert "access_log" in capsys.readouterr().out
    assert main(["--help", "deploy.htp_port"]) == 2
    assert "deploy.http_port?" in capsys.readouterr().err
