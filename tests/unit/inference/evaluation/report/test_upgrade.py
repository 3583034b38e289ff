"""The upgrade gate: several runs judged against the first, all bounds together."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from inference.compare import _MAX_CHANGED, decide, main
from inference.evaluation import gate
from inference.evaluation.gate import BREACHED, Measured, apply_gates
from inference.evaluation.options import Bound
from inference.evaluation.paired_tests import POWER, Pairs, smallest_drop
from inference.evaluation.record import Report
from inference.evaluation.report.compare import Run, compare_runs
from inference.evaluation.report.files import write_report
from inference.evaluation.task import Metric, Prediction
from tests.conftest import present

SAMPLES = 1850
RIGHT = 0.6  # of the first row's answers
CHANGED = 0.01  # of the answers, in a healthy upgrade
ROWS = 3
NO_DROP = {"lambada_x": Bound(paired="no drop at 95 %")}


def simulated(rng: np.random.Generator, old: np.ndarray, drop: float) -> Pairs:
    """Return the scores of a row: as many answers are lost as gained, and `drop` more are lost."""
    draw = rng.random(len(old))
    lost, gained = (CHANGED / 2 + drop) / RIGHT, CHANGED / 2 / (1 - RIGHT)
    new = np.where(old == 1.0, draw >= lost, draw < gained).astype(float)
    return Pairs(tuple(new.tolist()), tuple(old.tolist()))


def breached_rows(
    rng: np.random.Generator, metric: Metric, drops: Sequence[float], count: int = SAMPLES
) -> list[bool]:
    """Return which rows of one simulated upgrade are found to be worse."""
    old = (rng.random(count) < RIGHT).astype(float)
    rows = [simulated(rng, old, drop) for drop in drops]
    found = apply_gates([[Measured(metric, metric, each)] for each in rows], NO_DROP)
    return [each.verdicts[0].status == BREACHED for each in found]


@pytest.fixture
def metric(make_metric, monkeypatch) -> Metric:
    # The power of each row is not what is simulated, and takes most of the time.
    monkeypatch.setattr(gate, "smallest_drop", lambda *_, **__: None)
    return make_metric("lambada_x", 0.6, scale="mean")


def rates(metric: Metric, upgrades: int) -> tuple[float, float, float]:
    """Return the share of healthy upgrades with an alarm, and of those with a planted drop of one
    point in the second row that find it, and that accuse another.
    """
    rng = np.random.default_rng(11)
    healthy = [any(breached_rows(rng, metric, [0.0] * ROWS)) for _ in range(upgrades)]
    planted = [breached_rows(rng, metric, [0.0, 0.01, 0.0]) for _ in range(upgrades)]
    return (
        float(np.mean(healthy)),
        float(np.mean([each[1] for each in planted])),
        float(np.mean([each[0] or each[2] for each in planted])),
    )


def stated_power() -> float:
    """Return the smallest drop that 80 % of upgrades catch, as the verdicts state it."""
    found = smallest_drop(SAMPLES, CHANGED**0.5, 0.0, alpha=0.05 / ROWS, binary=True)
    return present(found)


@pytest.mark.long  # p values of several rows are compared with Holm's below
@pytest.mark.soak
def test_a_point_lost_in_one_row_is_found_and_healthy_rows_are_not_accused(metric, soak):
    upgrades = 100 * min(soak, 40)
    alarms, found, accused = rates(metric, upgrades)
    assert stated_power() == pytest.approx(0.01, abs=0.001)
    errors = 3 / upgrades**0.5  # three standard errors of a share
    assert max(alarms, accused) <= 0.05 + errors * (0.05 * 0.95) ** 0.5
    assert found >= POWER - errors * (POWER * (1 - POWER)) ** 0.5


def run_of(report: Report, metric: Metric, scores: Sequence[float], name: str) -> Run:
    """Return a run that scores its samples so."""
    own = replace(metric, value=sum(scores) / len(scores), count=len(scores))
    task = replace(report.tasks[0], metrics=(own,))
    predictions = [
        Prediction(
            "lambada", i, f"text {i}", "lamp", f"says {score:g}", {metric.name: score}, 0.01,
            id=f"id{i}",
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return replace(report, run_id=name, tasks=(task,)), predictions


GOOD = [1.0] * 300 + [0.0] * 100
WORSE = [0.0] * 20 + [1.0] * 280 + [0.0] * 100


@pytest.fixture
def runs(report, make_metric) -> dict[str, Run | str]:
    metric = make_metric("lambada_x", scale="mean")
    return {
        name: run_of(report, metric, scores, f"run_{name}")
        for name, scores in (("now", GOOD), ("next", GOOD), ("fp8", WORSE), ("tp2", GOOD))
    }


def test_the_row_that_lost_is_named_with_its_samples(runs, tmp_path):
    shown, status = decide(runs, {}, tmp_path)
    assert status == 3
    assert shown.startswith("sample: comparison: breached: fp8; held: next, tp2")
    saved = json.loads((tmp_path / "upgrade.json").read_text())
    statuses = {row: each["verdicts"][0]["status"] for row, each in saved["runs"].items()}
    assert statuses == {"next": "held", "fp8": "breached", "tp2": "held"}
    assert saved["first"] == "now"
    assert saved["runs"]["fp8"]["verdicts"][0]["smallest"] > 0.01
    root = ET.parse(tmp_path / "junit.xml").getroot()
    assert {suite.get("name"): suite.get("failures") for suite in root} == {
        "next": "0", "fp8": "1", "tp2": "0",
    }  # fmt: skip
    page = (tmp_path / "upgrade.md").read_text()
    assert "| lambada | now |  |  |  |  | 0.0% | 0 | 0 | 0 | 0 |" in page
    assert "| lambada | fp8 | 400 | 0 | 0 | 380 | 0.0% | 0 | 0 | 0 | 0 |" in page
    assert "| 0 | fp8 | text 0 | lamp | says 1 | says 0 | x now wrong |" in page
    assert page.count("now wrong") == 20


def test_bounds_of_all_rows_are_adjusted_together(runs):
    first, *others = (each for each in runs.values() if not isinstance(each, str))
    measured = [compare_runs(first, each).measured for each in others]
    bounds = {"lambada_x": Bound(paired="no drop at 95 %")}
    together = apply_gates(measured, bounds)[1].verdicts[0]
    (alone,) = apply_gates(measured[1:2], bounds)[0].verdicts
    assert present(together.p_value) == pytest.approx(3 * present(alone.p_value))
    assert present(together.smallest) > present(alone.smallest)


def test_a_row_without_figures_is_not_passed(runs, report, make_metric, tmp_path):
    del runs["fp8"]
    runs["tp2"] = "deploy: out of memory"
    metric = make_metric("lambada_x", scale="mean")
    runs["short"] = run_of(report, metric, GOOD[1:], "run_short")
    runs["text"] = run_of(report, replace(metric, method="by the text"), GOOD, "run_text")
    runs["none"] = run_of(report, make_metric("lambada_y", scale="mean"), GOOD, "run_none")
    _, status = decide(runs, {}, tmp_path)
    assert status == 4
    saved = json.loads((tmp_path / "upgrade.json").read_text())
    assert saved["failed"]["tp2"] == "deploy: out of memory"
    assert {*saved["failed"]} == {"tp2", "short", "text", "none"}
    assert "in another way" in saved["failed"]["text"]
    root = ET.parse(tmp_path / "junit.xml").getroot()
    assert root.findall("testsuite[@name='tp2']/testcase/error")


def test_too_few_samples_leave_an_upgrade_undecided(report, make_metric, tmp_path):
    metric = make_metric("lambada_x", scale="mean")
    few = {name: run_of(report, metric, GOOD[:40], name) for name in ("now", "next")}
    _, status = decide(few, {}, tmp_path)
    assert status == 5
    assert 'class="pill open">undecided: next' in (tmp_path / "upgrade.html").read_text()


@pytest.mark.parametrize(
    ("bounds", "reported"),
    [
        ({"other": Bound(paired="no drop at 95 %")}, "gate.other bounds a metric that is not"),
        ({"lambada_x": Bound(paired="no rise at 95 %")}, "lambada_x gets worse by a drop"),
        (
            {"lambada_x": Bound(paired="no drop of more than 75 points at 95 %")},
            "lambada_x is 0.75, so no drop can be that large",
        ),
    ],
)
def test_bounds_that_cannot_be_applied_are_refused(runs, tmp_path, bounds, reported):
    with pytest.raises(ValueError, match=reported):
        decide(runs, bounds, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_figures_without_scores_of_samples_are_said_to_be_unjudged(report, make_metric, tmp_path):
    paired, harness = make_metric("lambada_x", scale="mean"), make_metric("harness_x_acc")
    runs: dict[str, Run | str] = {}
    for name in ("now", "next"):
        run, predictions = run_of(report, paired, GOOD, name)
        task = replace(run.tasks[0], metrics=(*run.tasks[0].metrics, harness))
        runs[name] = (replace(run, tasks=(task,)), predictions)
    shown, status = decide(runs, {}, tmp_path)
    assert status == 0
    assert "not judged: harness_x_acc." in shown
    assert json.loads((tmp_path / "upgrade.json").read_text())["unjudged"] == ["harness_x_acc"]
    bounds = {"harness_x_acc": Bound(paired="no change of more than 1 point")}
    assert decide(runs, bounds, tmp_path)[1] == 0


def test_a_figure_that_cannot_get_worse_is_not_held(report, make_metric, tmp_path):
    metric = make_metric("lambada_x", scale="mean")
    silent = run_of(report, metric, [0.0] * 400, "silent")
    silent = (silent[0], [replace(each, answer="") for each in silent[1]])
    with pytest.raises(ValueError, match="no metric that can be compared by samples"):
        decide({"now": silent, "next": silent}, {}, tmp_path)
    good = run_of(report, metric, GOOD, "good")
    _, status = decide({"now": good, "next": silent}, {}, tmp_path)
    assert status == 3
    page = (tmp_path / "upgrade.md").read_text()
    assert "| lambada | next | 400 | 0 | 0 | 0 | 100.0% | 0 | 0 | 0 | 0 |" in page


def test_nothing_is_judged_without_the_first_run(runs, tmp_path):
    with pytest.raises(ValueError, match=r"the first run, now, has no report: it failed"):
        decide({**runs, "now": "it failed"}, {}, tmp_path)


def test_the_command_judges_reports(runs, tmp_path, capsys):
    paths = []
    for name, (report, predictions) in runs.items():
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, report, predictions)
        paths.append(str(tmp_path / name))
    assert main([*paths, "--gate", str(tmp_path / "page")]) == 3
    assert "breached: fp8" in capsys.readouterr().out
    words = ["--gate", str(tmp_path / "page"), "--bound", "lambada_x=no drop of more than 20 %"]
    assert main([*paths, *words]) == 2
    assert "is not a bound" in capsys.readouterr().err
    words[-1] += " at 95 %"
    assert main([*paths, *words]) == 0
    for wrong, option in ((words[2:], "--gate"), ([*words, "--output", "x.html"], "--output")):
        assert main([*paths, *wrong]) == 2
        assert option in capsys.readouterr().err
    assert main([*paths, *words[:3], "lambada_y=no drop of more than 20 % at 95 %"]) == 2
    assert "--bound lambada_y" in capsys.readouterr().err


def test_a_terminal_lists_a_few_changed_samples(runs, tmp_path, capsys):
    for name in ("now", "fp8"):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, *runs[name])
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "now"), str(tmp_path / "fp8"), "--output", str(page)]) == 0
    assert capsys.readouterr().out.count("now wrong") == _MAX_CHANGED
    assert page.read_text().count("now wrong") > _MAX_CHANGED


def test_nothing_is_held_that_was_not_compared(runs, tmp_path):
    alone = {"now": runs["now"]}
    bare: dict[str, Run | str] = {name: (report, []) for name, (report, _) in runs.items()}
    for given, bounds in ((alone, {}), (bare, {}), (runs, {"lambada_x": Bound()})):
        with pytest.raises(ValueError, match=r"now|lambada_x"):
            decide(given, bounds, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_figure_that_is_not_a_number_has_no_verdict(report, make_metric, tmp_path):
    metric = make_metric("lambada_x", scale="mean")
    scores = {"now": GOOD, "next": [math.nan, *GOOD[1:]]}
    found = {name: run_of(report, metric, each, name) for name, each in scores.items()}
    _, status = decide(found, {"lambada_x": Bound(min=0.0)}, tmp_path)
    assert status == 4
