"""Several runs of one command: each is checked first, and a failure stops only its own."""

import io

from launcher_scripts.console import Console
from launcher_scripts.main import main
from launcher_scripts.rows import run_rows
from tests.unit.launcher_scripts.test_run import make_run
from tests.unit.launcher_scripts.toy_stages import WriteStage, settings

SAMPLE = ("action=upgrade", "export=gpt3/sample", "stages=[evaluate]")
TP = "export.model.tensor_model_parallel_size"


def test_nothing_starts_when_one_row_cannot_run(tmp_path, capsys):
    """A problem of every row is reported once, that of some with their names."""
    rows = f"upgrade.rows={{one:{{{TP}:1}},three:{{{TP}:3}},five:{{{TP}:5}}}}"
    words = [*SAMPLE, rows, "evaluate.time_limit=soon", f"base_results_dir={tmp_path}/r"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert f"three: {TP}=3 does not divide" in shown
    assert f"five: {TP}=5 does not divide" in shown
    assert shown.count("evaluate.time_limit=soon: not a time limit") == 1
    assert not (tmp_path / "r").exists()


def test_one_failure_does_not_stop_the_others_and_is_the_exit_status(tmp_path):
    rows = []
    for name, fails in (("first", "error"), ("second", "")):
        run, _ = make_run(WriteStage(settings(tmp_path / name, "write"), fails=fails))
        run.name = name
        rows.append(run)
    text = io.StringIO()
    assert run_rows(rows, Console(text), wait=False) == 1
    assert [each.status for each in rows] == [1, 0]
    assert "[2/2] second" in text.getvalue()
