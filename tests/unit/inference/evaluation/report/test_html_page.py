"""The HTML page: self-contained, escaped, legible, and readable where no script runs."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from inference.evaluation.gate import GateResult, Measured, apply_gate
from inference.evaluation.options import Bound
from inference.evaluation.record import LatencyPoint, Report, StageTiming
from inference.evaluation.report.document import markdown, terminal_text
from inference.evaluation.report.files import report_page
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import Prediction
from launcher_scripts.configuration.schema import WatchSection
from launcher_scripts.watch_state import Watched, WatchState

_VOID = {"meta"}


def render_html(report: Report, predictions: Sequence[Prediction]) -> str:
    return report_page(report, predictions).html()


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
    assert json.loads(data)["samples"][0]["text"] == text
    assert not set(data) & set("<>&\u2028\u2029")
    assert "alert" not in script


def test_the_page_holds_the_record_and_the_samples(page, report, predictions):
    found = data_of(page)
    assert found["report"]["run_id"] == report.run_id
    assert [row["values"] for row in found["samples"]] == [each.values for each in predictions]


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_the_pages_own_style_and_script_alone(page, tag):
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in page
    assert "unsafe" not in page


def data_of(page: str) -> Any:
    return json.loads(re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)[0])


def test_a_figure_that_json_has_no_number_for_leaves_the_page_readable(report, make_metric):
    task = replace(report.tasks[0], metrics=(make_metric(high=float("inf")),))
    page = render_html(replace(report, tasks=(task,)), ())
    assert "Infinity" not in page
    assert data_of(page)["report"]["tasks"][0]["metrics"][0]["high"] is None


def test_names_are_escaped(report, predictions):
    page = render_html(replace(report, run=replace(report.run, name="<img src=x>")), predictions)
    assert "<img" not in page


def test_light_and_dark_define_the_same_colours(page):
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = set(re.findall(r"--[\w-]+(?=:)", light))
    assert names == set(re.findall(r"--[\w-]+(?=:)", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= names


@pytest.mark.parametrize(
    ("bound", "words", "kind"),
    [
        (Bound(min=0), "gate passed (1 of 1 bounds hold)", "good"),
        (Bound(min=1), "gate breached (1 of 1 bounds)", "bad"),
        (None, "no gate set", "quiet"),
    ],
)
def test_the_verdict_comes_first(report, predictions, bound, words, kind):
    bounds = {"lambada_last_word": bound} if bound else {}
    gate = apply_gate(map(Measured, report.metrics), bounds)
    page = render_html(replace(report, bounds=bounds, gate=gate), predictions)
    assert f'class="pill {kind}">{words}</span>' in page
    first = re.findall("^## (.*)$", page, re.MULTILINE)[0]
    assert first == ("Gate" if bound else "Lambada")


def test_undecided_is_neither_good_nor_bad(report, predictions):
    bounds = {"lambada_last_word": Bound(min=0)}
    (held,) = apply_gate(map(Measured, report.metrics), bounds).verdicts
    gate = GateResult((replace(held, status="insufficient"),))
    page = render_html(replace(report, bounds=bounds, gate=gate), predictions)
    assert 'class="pill open">gate undecided' in page


def test_the_page_holds_the_markdown_for_readers_without_scripts(report, predictions):
    found = report_page(report, predictions)
    (shown,) = re.findall(r'<pre id="markdown">(.*?)</pre>', found.html(), re.DOTALL)
    assert html.unescape(shown) == found.text
    assert "| lambada_last_word | 50.00% | 40.00% to 60.00% | 100 |" in found.text


HOSTILE_TEXT = "*bold* [a](b) <b> @someone #1 `code` _word_ a_b ~~no~~ $x$ | end"


def remark(text: str) -> str:
    """Return the page of a watch whose only checkpoint has a remark, as Markdown."""
    state = WatchState(WatchSection(Path()), Path())
    state.watched[1] = Watched(1, "", "a", problem=text)
    return markdown("checkpoints", title="", state=state)


def test_cells_of_markdown_hold_no_markup_and_call_nobody():
    text = remark(HOSTILE_TEXT)
    assert text.splitlines()[-1] == (
        "| 1 | waiting | a | - | \\*bold\\* \\[a\\](b) \\<b\\> &#64;someone \\#1 \\`code\\` "
        "\\_word\\_ a_b \\~\\~no\\~\\~ \\$x\\$ \\| end |"
    )
    assert HOSTILE_TEXT in terminal_text(text)


def test_half_a_surrogate_pair_can_be_written():
    assert remark("\ud83d").encode().splitlines()[-1] == b"| 1 | waiting | a | - | ? |"


def test_a_command_cannot_end_its_block(report):
    command = "python main.py 'a```\n\n## Verdict\n````b'"
    text = report_page(replace(report, run=replace(report.run, command=command)), ()).text
    assert "`````\npython main.py 'a```  ## Verdict ````b'\n`````" in text


def test_a_report_without_optional_parts_is_drawn(report):
    page = render_html(report, ())
    assert data_of(page)["samples"] == []
    assert Page(page).open == []


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_and_marks_have_the_contrast_of_wcag_aa(page, scheme):
    block = re.findall(r":root \{(.*?)\}", page, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))

    def contrast(front: str, back: str) -> float:
        low, high = sorted(luminance(colours[each]) + 0.05 for each in (front, back))
        return high / low

    backs = ("page", "card", "quiet-back")
    for ink in ("ink", "soft", "faint", "good", "bad", "open", "accent"):
        for back in backs:
            assert contrast(ink, back) >= 4.5, (ink, back)
    for pill in ("good", "bad", "open"):
        assert contrast(pill, f"{pill}-back") >= 4.5, pill
    assert contrast("ink", "mark") >= 4.5
    for number in range(8):  # of graphics
        assert contrast(f"s{number}", "card") >= 3, number
