"""The HTML page: self-contained, escaped, and drawn from the record."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from inference.evaluation.options import Bound
from inference.evaluation.record import (
    Comparison,
    LatencyPoint,
    ReferenceComparison,
    RequestStatistics,
    StageTiming,
)
from inference.evaluation.report.charts import (
    accuracy_chart,
    latency_comparison_chart,
    latency_histogram,
    log_ticks,
    nice_ticks,
    stages_chart,
    sweep_charts,
    throughput_chart,
)
from inference.evaluation.report.files import render_html
from inference.evaluation.run.timing import distribution

_VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Collects attributes that name other resources, and checks that elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, _tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(report, predictions) -> str:
    point = LatencyPoint(1, 32, 8, 1, 4, 32, distribution([0.1, 0.2]), 100.0, 90.0, 8.0)
    stages = (StageTiming("convert", "completed", 2.0), StageTiming("deploy", "ready", 1.0))
    return render_html(
        replace(report, latency=(point,), run=replace(report.run, stages=stages, command="make")),
        predictions,
    )


def test_the_page_asks_for_nothing_else(page):
    assert Page(page).links == []
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_every_element_is_closed(page):
    assert Page(page).open == []


HOSTILE = (
    "</script><b>& the",
    "<!-- <script> and no end",
    "--></style><script>alert(1)</script>",
    "one\u2028two\u2029three \\u003c]]>",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_samples_stays_data(report, predictions, text):
    hostile = [replace(predictions[0], text=text, target=text, answer=text), predictions[1]]
    page = render_html(report, hostile)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert json.loads(data)["rows"][0]["text"] == text
    assert not set(data) & set("<>&\u2028\u2029")
    assert "alert" not in script


def test_marks_of_samples_are_in_the_data(page):
    (data, _) = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert [row["marks"] for row in json.loads(data)["rows"]] == [[1], [0]]


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_the_pages_own_style_and_script_alone(page, tag):
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in page
    assert "unsafe" not in page


def test_metrics_of_one_quantity_share_a_column(report, predictions, make_metric):
    parts = (make_metric(), make_metric("lambada_last_word_de", sample_value="lambada_last_word"))
    task = replace(report.tasks[0], metrics=parts)
    page = render_html(replace(report, tasks=(task,)), predictions)
    assert page.count('<th class="mark">') == 1


def test_names_are_escaped(report, predictions):
    page = render_html(replace(report, run=replace(report.run, name="<img src=x>")), predictions)
    assert "<img" not in page


def test_light_and_dark_define_the_same_colours(page):
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = set(re.findall(r"--[\w-]+(?=:)", light))
    assert names == set(re.findall(r"--[\w-]+(?=:)", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= names


def test_the_verdict_is_shown(report, predictions, make_metric):
    assert "no gate set" in render_html(report, predictions)
    passed = render_html(replace(report, bounds={"lambada_last_word": Bound(min=0)}), predictions)
    assert 'class="pill good"' in passed


def test_a_report_without_optional_parts_is_drawn(report):
    page = render_html(report, ())
    assert "Samples" not in page
    assert Page(page).open == []


def drawn(chart: str) -> ET.Element:
    return ET.fromstring(f"<div>{chart}</div>")


def marks(chart: str, tag: str, kind: str) -> list[ET.Element]:
    """Return the elements of a tag and of a class, in their order."""
    return [each for each in drawn(chart).iter(tag) if kind in each.get("class", "").split()]


def place(element: ET.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%"))


def numbers(chart: str) -> list[float]:
    found = re.findall(r' (?:x1|x2|y1|y2|cx|cy|r|width|height)="([^"%]*)%?"', chart)
    return [float(each) for each in found]


def test_accuracy_marks_lie_in_order_on_one_scale(report, make_metric):
    compared = (Comparison("lambada_last_word", 0.5, 0.4, 0.1), Comparison("other", 0.2, 0.1, 0.1))
    task = replace(
        report.tasks[0],
        metrics=(make_metric(value=0.5),),
        reference=ReferenceComparison("another run", compared),
    )
    report = replace(
        report,
        baseline={"lambada_last_word": make_metric(value=0.45)},
        bounds={"lambada_last_word": Bound(min=0.3), "other_perplexity": Bound(max=9.0)},
    )
    chart = accuracy_chart(report, task)
    (value,) = marks(chart, "circle", "value")
    places = {
        each[0].attrib["class"]: place(each, "x")
        for each in drawn(chart).iter("svg")
        if "x" in each.attrib
    }
    assert places.keys() == {"reference", "baseline", "bound"}
    assert places["bound"] < places["reference"] < places["baseline"] < place(value, "cx")
    assert "reference: another run" in chart


def test_what_is_not_drawn_has_no_key(report):
    chart = accuracy_chart(replace(report, bounds={"other": Bound(min=0.3)}), report.tasks[0])
    assert [each.text for each in drawn(chart).iter("li")] == [None]
    assert "measured" in chart
    assert "bound" not in chart


@pytest.mark.parametrize("values", [[0.01], [0.01] * 5, [0.001 * n for n in range(1, 300)]])
def test_latency_histogram_counts_every_request(values):
    chart = latency_histogram(distribution(values))
    hints = [each.text or "" for each in drawn(chart).iter("title")]
    assert sum(int(hint.split()[0]) for hint in hints) == len(values)
    assert all(number >= 0 for number in numbers(chart))


def test_throughput_of_the_shortest_run_is_drawn():
    requests = RequestStatistics(1, 1, 0.01, 100.0, distribution([0.01]), 0.1, (1,))
    assert all(number >= 0 for number in numbers(throughput_chart(requests)))


def sweep(title: str, points) -> str:
    return dict(sweep_charts(points))[title]


def test_sweep_charts_draw_every_point():
    points = [
        LatencyPoint(1, 32, length, flight, 4, 32, distribution([0.1, 0.3]), 50.0 * flight, 9.0)
        for length in (1, 64)
        for flight in (1, 4)
    ]
    assert len(marks(sweep("Latency of a request", points), "circle", "point")) == 4
    throughput = sweep("Throughput", points)
    assert len(marks(throughput, "rect", "bar")) == 4
    assert len(list(drawn(throughput).iter("li"))) == 2


def sweep_point(latency_s: float, *, flight: int = 1, further_ms: float | None = 2.0):
    latency = distribution([latency_s, 1.5 * latency_s])
    return LatencyPoint(1, 32, 8, flight, 4, 32, latency, 50.0, 9.0, further_ms, 12.0)


def test_times_far_apart_are_drawn_on_a_log_scale():
    near = sweep("Latency of a request", [sweep_point(0.1), sweep_point(0.2, flight=4)])
    far = sweep("Latency of a request", [sweep_point(0.001), sweep_point(0.9, flight=4)])
    assert "log scale" in far
    assert "log scale" not in near
    low, high = (place(each, "cy") for each in marks(far, "circle", "point"))
    assert high < low
    assert all(number >= 0 for number in numbers(far))


def test_points_without_further_tokens_are_left_out_of_their_chart():
    points = [sweep_point(0.1), sweep_point(0.1, flight=4, further_ms=None)]
    assert len(marks(sweep("Each further token", points), "circle", "point")) == 1
    assert len(marks(sweep("Time to the first token", points), "circle", "point")) == 2


def test_runs_are_compared_point_by_point():
    pair = (sweep_point(0.1), sweep_point(0.05))
    chart = latency_comparison_chart([pair])
    first, second = (place(each, "cx") for each in marks(chart, "circle", "point"))
    assert second < first
    assert any(each.text == "32 + 8, 1 in flight" for each in drawn(chart).iter("b"))


def test_stages_follow_each_other_unless_they_say_when():
    stages = [
        StageTiming("a", "done", 4.0),
        StageTiming("b", "done", 4.0),
        StageTiming("c", "", 1, 2),
    ]
    bars = marks(stages_chart(stages), "rect", "bar")
    first, second, third = (place(each, "x") for each in bars)
    width = place(bars[0], "width")
    assert second == pytest.approx(first + width, abs=0.1)
    assert third == pytest.approx(first + width / 2, abs=0.1)


def test_log_ticks_reach_around_the_values():
    assert log_ticks(3, 40) == pytest.approx([2, 5, 10, 20, 50])
    assert log_ticks(0.2, 0.2) == pytest.approx([0.2, 0.5])
    assert log_ticks(1, 1000)[-1] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("high", "ticks"),
    [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7, [0, 2, 4, 6, 8]), (0.0, [0, 1]), (230, None)],
)
def test_ticks_are_round_and_reach_the_top(high, ticks):
    found = nice_ticks(high)
    assert found[-1] >= high
    assert len(found) <= 7
    if ticks is not None:
        assert found == pytest.approx(ticks)
