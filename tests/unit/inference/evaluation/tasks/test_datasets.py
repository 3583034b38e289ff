"""Data sets: found, fetched once with a checksum, read strictly."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions
from inference.evaluation.run.checks import unreachable_data
from inference.evaluation.task import Sample
from inference.evaluation.tasks.datasets import DataSource, TaskData, drawn, read_rows

CONTENT = b'{"text": "a b"}\n'
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "served" / "data.jsonl"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path.as_uri()


def data(path: Path, url: str, sha256: str = SHA256) -> TaskData:
    return TaskData(path, "evaluate.lambada.data_path", DataSource(url, sha256))


def fetch(path: Path, url: str, sha256: str = SHA256) -> None:
    assert data(path, url, sha256).file() == path


def test_a_missing_data_set_is_downloaded(tmp_path, source):
    path = tmp_path / "data" / "lambada.jsonl"
    fetch(path, source)
    assert path.read_bytes() == CONTENT
    assert [each.name for each in path.parent.iterdir()] == ["lambada.jsonl"]


def test_a_data_set_at_hand_is_not_downloaded(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_bytes(CONTENT)
    fetch(path, "file:///nowhere")
    assert path.read_bytes() == CONTENT


def test_a_changed_data_set_is_refused_with_both_checksums(tmp_path, source):
    path = tmp_path / "lambada.jsonl"
    path.write_bytes(b"other")
    with pytest.raises(ValueError, match=rf"expected {SHA256}; delete it") as caught:
        fetch(path, source)
    assert hashlib.sha256(b"other").hexdigest() in str(caught.value)


def test_without_network_the_file_to_place_is_named(tmp_path):
    path = tmp_path / "data" / "lambada.jsonl"
    with pytest.raises(ValueError, match="on a machine without network place the file") as caught:
        fetch(path, (tmp_path / "gone").as_uri())
    assert str(path) in str(caught.value)
    assert "evaluate.lambada.data_path" in str(caught.value)
    assert list(path.parent.iterdir()) == []


def test_what_cannot_be_downloaded_is_known_before_it_is_needed(tmp_path, source):
    path = tmp_path / "data" / "lambada.jsonl"
    gone = data(path, (tmp_path / "gone").as_uri())
    assert f"place the file (SHA-256 {SHA256}) at {path}" in gone.problem()
    assert data(path, source).problem() == ""
    assert not path.parent.exists()
    fetch(path, source)
    assert gone.problem() == ""  # it is at hand


def test_unreachable_data_is_a_problem_of_the_options(tmp_path):
    own = LambadaOptions(url=(tmp_path / "gone").as_uri())
    options = EvaluationOptions(output_dir=tmp_path, data_dir=tmp_path, lambada=own)
    assert len(unreachable_data(options)) == 1
    own.data_path = str(tmp_path / "mine.jsonl")  # whether that is there is asked elsewhere
    assert unreachable_data(options) == []


def test_a_download_that_ends_within_a_chunk_leaves_nothing(tmp_path):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ff\r\nhalf of it")
            self.close_connection = True

        def log_message(self, *_):
            """Keep quiet."""

    path = tmp_path / "data" / "lambada.jsonl"
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(ValueError, match="on a machine without network place the file"):
            fetch(path, f"http://127.0.0.1:{server.server_port}/data")
    assert list(path.parent.iterdir()) == []


def test_a_download_with_another_checksum_leaves_nothing(tmp_path, source):
    path = tmp_path / "data" / "lambada.jsonl"
    with pytest.raises(ValueError, match="nothing was kept"):
        fetch(path, source, sha256="0" * 64)
    assert list(path.parent.iterdir()) == []


def test_every_malformed_line_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine here"}\nnot json\n{"words": 1}\n\n{"text": " "}\n')
    with pytest.raises(ValueError, match="is not a data set") as caught:
        read_rows(path, "text")
    assert [f"line {number}" in str(caught.value) for number in (1, 2, 3, 5)] == [
        False,
        True,
        True,
        True,
    ]


def test_a_separator_of_lines_inside_a_text_ends_no_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert [row["text"] for row in read_rows(path, "text")] == ["one\u2028two\x85three"]


def test_the_mark_and_line_ends_of_other_editors_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert [row["text"] for row in read_rows(path, "text")] == ["one", "two"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_refused_with_the_name_of_the_file(tmp_path, encoding):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "d\u00e9j\u00e0 vu"}\n', encoding=encoding)
    with pytest.raises(ValueError, match=r"data\.jsonl is not UTF-8 at byte"):
        read_rows(path, "text")


def test_an_empty_data_set_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no samples"):
        read_rows(path, "text")


def draw(**choice):
    samples = [Sample(index, str(index), target="") for index in range(100)]
    options = EvaluationOptions(data_dir=Path(), **choice)
    return drawn(samples, options, name="n", path="p", sha256="s")


def test_a_draw_is_repeatable_and_in_order():
    dataset, chosen = draw(limit=10, seed=7)
    assert chosen == draw(limit=10, seed=7)[1] == sorted(chosen, key=lambda each: each.index)
    assert chosen != draw(limit=10, seed=8)[1]
    assert (dataset.total, dataset.count, dataset.limit, dataset.seed) == (100, 10, 10, 7)


@pytest.mark.parametrize("limit", [None, 100, 1000])
def test_all_samples_are_asked_unless_the_limit_is_lower(limit):
    dataset, chosen = draw(limit=limit, seed=7)
    assert [each.index for each in chosen] == list(range(100))
    assert (dataset.count, dataset.limit, dataset.seed) == (100, None, None)
