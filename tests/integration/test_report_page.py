"""The report in a real browser: light and dark, wide and narrow, and without any request."""

import base64
import functools
import hashlib
import re
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from inference.certify.certificate import _rendered
from inference.evaluation.options import EvaluationOptions, LambadaOptions, LatencyOptions
from inference.evaluation.record import RunFacts, StageTiming, read_predictions, read_report
from inference.evaluation.report.files import report_page
from inference.evaluation.run.evaluator import evaluate
from tests.fake_model import partly_right_model, write_passages

Browser = Callable[..., str]
LIGHT, DARK = 1, 0  # Chromium's preferredColorScheme
HEADER = {LIGHT: (0xFF, 0xFF, 0xFF), DARK: (0x17, 0x1E, 0x26)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    options = EvaluationOptions(
        output_dir=folder / "out",
        data_dir=folder,
        lambada=LambadaOptions(data_path=write_passages(folder / "passages.jsonl")),
        latency=LatencyOptions(shapes=["8+1", "8+4"], concurrencies=[1, 2], requests=4),
        gate={"lambada_last_word": {"min": 0.1}},
    )
    stages = (StageTiming("convert", "completed", 3.0), StageTiming("deploy", "ready", 5.0))
    facts = RunFacts(name="sample_model", command="python main.py " + "word " * 40, stages=stages)
    for _ in range(2):
        model = partly_right_model()
        model.streams = True
        evaluate(options, facts, model=model)
    return folder / "out"


@pytest.fixture
def requested() -> list[str]:
    """Return the paths that were asked of the test's own server."""
    return []


@pytest.fixture
def url(folder: Path, requested: list[str]) -> Iterator[str]:
    """Serve the report's folder on loopback."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requested.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """Return a function that opens an address and returns the page as the browser then has it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")

    profile = tmp_path_factory.mktemp("profile")

    def opened(address: str, *, scheme: int = LIGHT, width: int = 1200, shot: Path) -> str:
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={width},1400",
            f"--screenshot={shot}",
            "--dump-dom",
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return opened


def first_pixel(path: Path) -> tuple[int, ...]:
    """Return red, green and blue of a PNG's first pixel, which every filter leaves as it is."""
    data = path.read_bytes()
    packed, position = b"", 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + length]
        position += length + 12
    return tuple(zlib.decompress(packed)[1:4])


def with_script(folder: Path, name: str, script: str) -> str:
    """Write a copy of the report that may run `script` at its end, and return the copy's name."""
    page = (folder / "report.html").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ")
    (folder / name).write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    return name


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_report_follows_the_colour_scheme(browser, url, tmp_path, scheme):
    page = browser(f"{url}/report.html", scheme=scheme, shot=tmp_path / "shot.png")
    assert first_pixel(tmp_path / "shot.png") == HEADER[scheme]
    # Four charts of the sweep, the accuracies and the stages.
    assert len(re.findall("<figure", page)) == 4 + 2
    assert len(re.findall('class="rows"', page)) == 2  # accuracies and stages
    assert len(re.findall('aria-expanded="false"', page)) == 4
    assert "4 of 4 samples" in page


def test_figures_that_json_has_no_number_for_hide_no_other(browser, url, folder, tmp_path):
    infinite: list[dict[str, Any]] = [{name: float("inf")} for name in ("value", "low", "high")]
    report = read_report(folder / "report.json")
    (task,) = report.tasks
    assert len(task.metrics) >= 3
    metrics = tuple(
        replace(each, **figure) for each, figure in zip(task.metrics, cycle(infinite), strict=False)
    )
    changed = replace(report, tasks=(replace(task, metrics=metrics),))
    samples = read_predictions(folder / "predictions.jsonl")
    (folder / "infinite.html").write_text(report_page(changed, samples).html())
    page = browser(f"{url}/infinite.html", shot=tmp_path / "shot.png")
    assert "not a number" in page
    assert "4 of 4 samples" in page
    assert "NaN" not in page


def test_a_certificate_fits_a_narrow_window(browser, url, folder, tmp_path):
    script = "document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`"
    table: dict[str, Any] = {
        "verdict": "equal",
        "status": "equal",
        "made_at": "",
        "version": "",
        "left_out": [],
    }
    part = {"name": "x", "status": "equal", "compared": "y" * 300, "up_to": [], "findings": []}
    table |= {"parts": [part], "source": None, "folder": None, "card": "word " * 60 + "z" * 300}
    page = _rendered("html", table, digest="0" * 64) + f"<script>{script}</script>"
    (folder / "certificate.html").write_text(page)
    shown = browser(f"{url}/certificate.html", width=520, shot=tmp_path / "shot.png")
    wide, room = map(int, re.findall(r"<title>(\d+) of (\d+)</title>", shown)[0])
    assert wide <= room


# A window of Chromium is at least 500 pixels wide; a frame in it may be narrower.
_FRAME = """<!doctype html><iframe src="report.html" style="width: %dpx; height: 900px"></iframe>
<script>
document.querySelector("iframe").onload = ({ target }) => {
  const { documentElement: root } = target.contentDocument;
  const problems = root.scrollWidth > target.clientWidth ? [`${root.scrollWidth} wide`] : [];
  let labels = 0;
  for (const label of root.querySelectorAll("svg text")) {
    const [box, card] = [label, label.closest(".card")].map((each) => each.getBoundingClientRect());
    labels += 1;
    const isWhole = box.left >= card.left && box.right <= card.right;
    if (!isWhole) problems.push(`cut: ${label.textContent}`);
    if (box.height < 9) problems.push(`${box.height} high: ${label.textContent}`);
  }
  for (const chart of root.querySelectorAll("svg")) {
    const box = chart.getBoundingClientRect();
    const card = chart.closest(".card").getBoundingClientRect();
    if (box.right > card.right) problems.push(`chart cut: ${chart.outerHTML}`);
  }
  document.title = `${labels} labels, problems: ${problems.join("; ")}.`;
};
</script>"""


@pytest.mark.parametrize("width", [1100, 390])
def test_charts_are_whole_and_legible(browser, url, folder, tmp_path, width):
    (folder / "frame.html").write_text(_FRAME % width)
    page = browser(f"{url}/frame.html", shot=tmp_path / "shot.png")
    labels, problems = re.findall(r"<title>(\d+) labels, problems: (.*)\.</title>", page)[0]
    assert int(labels) > 30
    assert problems == ""


def test_samples_can_be_searched(browser, url, folder, tmp_path):
    name = with_script(
        folder,
        "search.html",
        "const box = document.getElementById('search'); box.value = 'GARDEN';"
        "box.dispatchEvent(new Event('input'));",
    )
    page = browser(f"{url}/{name}", shot=tmp_path / "shot.png")
    assert "1 of 4 samples" in page
    assert "<mark>garden</mark>" in page


def test_samples_can_be_filtered(browser, url, folder, tmp_path):
    name = with_script(
        folder,
        "filter.html",
        "const box = document.getElementById('filter'); box.value = 'right1';"
        "box.dispatchEvent(new Event('change'));",
    )
    page = browser(f"{url}/{name}", shot=tmp_path / "shot.png")
    assert "2 of 4 samples" in page


def test_the_page_makes_no_request(browser, url, folder, requested, tmp_path):
    name = with_script(
        folder, "leak.html", "new Image().src = '/leak.png'; fetch('/leak.json').catch(() => 0);"
    )
    browser(f"{url}/{name}", shot=tmp_path / "shot.png")
    assert set(requested) - {"/favicon.ico"} == {f"/{name}"}


def test_markup_in_samples_is_shown_and_does_not_run(browser, url, folder, tmp_path):
    owned = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    texts = ["<!-- <script>", f"</script>{owned}", f"one\u2028two {owned}", "]]>--></style><b>"]
    report = read_report(folder / "report.json")
    predictions = [
        replace(each, text=text, target=text, answer=text)
        for each, text in zip(read_predictions(folder / "predictions.jsonl"), texts, strict=True)
    ]
    hostile = replace(report, run=replace(report.run, name=owned, command=owned))
    (folder / "hostile.html").write_text(report_page(hostile, predictions).html())
    # Nor does a script that reached the page some other way.
    page = (folder / "hostile.html").read_text().replace("</body>", f"{owned}</body>")
    (folder / "injected.html").write_text(page)
    for name in ("hostile.html", "injected.html"):
        shown = browser(f"{url}/{name}", shot=tmp_path / "shot.png")
        assert "<title>owned</title>" not in shown
        assert "4 of 4 samples" in shown
        assert len(re.findall('aria-expanded="false"', shown)) == 4
        assert "&lt;!-- &lt;script&gt;" in shown
