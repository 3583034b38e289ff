"""The client command without a server: flags, request files, messages."""

import contextlib
import json
import socket
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from export_scripts.triton.signature import MODEL_SIGNATURES, ensemble
from inference.client import main, merged
from inference.server.client import TritonClient
from inference.server.tensors import as_tensor, as_texts, file_tensors
from inference.system.ports import pick_free_ports


def test_every_option_of_the_contract_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    for model_type in ("GPT", "GPT-J", "GPT-NeoX", "T5"):
        for tensor in ensemble(MODEL_SIGNATURES[model_type]).inputs:
            if tensor.optional and not tensor.name.startswith("INPUT_"):
                assert "--" + tensor.name.replace("_", "-") in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "127.0.0.1:99999", "grpc://127.0.0.1:"])
def test_what_is_no_port_is_refused_in_one_line(url, capsys):
    assert main(["health", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("error: --url=127.0.0.1:")


def test_what_does_not_speak_http_is_named_in_one_line(capsys):
    def answer() -> None:
        while server.fileno() >= 0:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"\0\0\x12\4 frame\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert main(["generate", "text", "--url", url]) == 1
    assert "is not HTTP" in capsys.readouterr().err


def test_parameters_merge_into_a_request_file_and_replace_its_lists():
    base = {"config": {"url": "a", "protocol": "http"}, "request": [1, 2]}
    assert merged(base, {"config": {"url": "b"}, "request": [3]}) == {
        "config": {"url": "b", "protocol": "http"},
        "request": [3],
    }


def test_request_entries_become_tensors_of_their_dtype():
    tensors = file_tensors(
        [
            {"name": "input_ids", "data": [[1, 2]], "dtype": "uint32"},
            {"name": "INPUT_0", "data": [["\u00fcber"]], "dtype": "object"},
        ]
    )
    assert tensors["input_ids"].dtype == np.uint32
    assert tensors["INPUT_0"].tolist() == [["\u00fcber".encode()]]


def test_all_bad_entries_of_a_request_file_are_named():
    with pytest.raises(ValueError, match=r"request\[0\]: key 'dtype' is missing") as caught:
        file_tensors(
            [
                {"name": "a", "data": [1]},
                {"name": "b", "data": ["x"], "dtype": "int32"},
                {"name": "c", "data": [1], "dtype": "quaternion"},
                {"name": "d", "data": [[1], [1, 2]], "dtype": "int32"},
                {"name": "e", "data": [[2, -1]], "dtype": "uint32"},
                {"name": "f", "data": [1.5], "dtype": "int32"},
            ]
        )
    reported = str(caught.value)
    assert "request[1] (b)" in reported
    assert "request[2] (c)" in reported
    assert "request[3] (d): rows differ in length; pad them" in reported
    assert "request[4] (e): -1 does not fit uint32" in reported
    assert "request[5] (f): 1.5 does not fit int32" in reported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON object: Expecting"),
        ("[]", "is not a JSON object: it is of type list"),
        (json.dumps({"config": {"urll": "x"}}), "config: unknown keys urll"),
        (json.dumps({"config": []}), "config: [] is not an object"),
        (json.dumps({"config": {"model_name": 5}}), "config: model_name=5 is not a text"),
    ],
)
def test_unusable_request_file_is_explained(tmp_path, capsys, text, message):
    path = tmp_path / "request.json"
    path.write_text(text)
    assert main(["request", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_absent_request_file_is_an_error_not_a_traceback(tmp_path, capsys):
    assert main(["request", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_absent_server_is_said_in_one_line(capsys, protocol):
    url = f"127.0.0.1:{pick_free_ports('127.0.0.1', 1)[0]}"
    assert main(["health", "--url", url, "--protocol", protocol]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {url}: no server answers there; is it running, and are host")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("url", ["ftp://localhost:8000", "grpc://localhost:8001"])
def test_url_of_another_protocol_is_refused(capsys, url):
    assert main(["health", "--url", url, "--protocol", "http"]) == 1
    assert f"--url={url}: write host:port, http://host:port or grpc" in capsys.readouterr().err


def test_host_that_is_none_is_said_in_one_line(capsys):
    assert main(["health", "--url", "http://nowhere.invalid"]) == 1
    assert "nowhere.invalid:8000: no such host" in capsys.readouterr().err


def test_stream_that_takes_characters_back_is_shown_once_it_is_sure():
    frames = ["a", "a\ufffd", "a\u4f60", "a\u4f60b"]

    class Streaming(TritonClient):
        def text_request(self, *_: object, **__: object) -> dict[str, Any]:
            return {}

        def stream(self, *_: object, **__: object) -> Generator[dict[str, Any], None, None]:
            return ({"OUTPUT_0": np.array([[text.encode()]], object)} for text in frames)

    with Streaming("127.0.0.1:1") as client:
        assert list(client.stream_text("x", output_len=3)) == ["a", "\ufffd", "\u4f60b"]
        frames[:] = ["ab", "a", "abc"]
        assert list(client.stream_text("x", output_len=3)) == ["ab", "c"]


@pytest.mark.parametrize("text", ["[]", '{"host": "n1"}', "nothing"])
def test_another_file_than_a_published_address_is_named(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["health", "--url", str(path)]) == 1
    assert f"error: {path} is not " in capsys.readouterr().err


def test_generating_without_a_prompt_is_refused(capsys):
    assert main(["generate"]) == 1
    assert "no prompt" in capsys.readouterr().err


def test_values_become_columns_of_the_declared_type():
    assert as_tensor([1, 2], "UINT32").tolist() == [[1], [2]]
    assert as_tensor([0.5], "FP32").dtype == np.float32
    assert as_tensor(["\u00fcber"], "BYTES").tolist() == [["\u00fcber".encode()]]
    table = np.ones((3, 4), np.float32)
    assert as_tensor([table, table], "FP16").shape == (2, 3, 4)
    with pytest.raises(ValueError, match="-1 is not a valid UINT32"):
        as_tensor([-1], "UINT32")


def test_texts_come_in_rows_of_beams_whether_or_not_the_server_says_so():
    assert as_texts(np.array([[b"a", b"b"]], object)) == [["a", "b"]]
    assert as_texts(np.array([b"a", b"b"], object)) == [["a"], ["b"]]


def test_streaming_over_http_and_unknown_protocols_are_refused():
    with TritonClient("127.0.0.1:1", protocol="http") as client:
        with pytest.raises(ValueError, match="streaming needs protocol=grpc"):
            client.stream("m", {})
        with pytest.raises(ValueError, match="beam_width must be 1 to stream"):
            next(client.stream_text("a", output_len=1, options={"beam_width": 2}))
    with pytest.raises(ValueError, match="protocol='ftp' is unknown"):
        TritonClient(protocol="ftp")


def test_published_address_is_an_url(tmp_path, capsys):
    path = tmp_path / "endpoint.json"
    (port,) = pick_free_ports("127.0.0.1", 1)
    path.write_text(json.dumps({"host": "127.0.0.1", "http": port, "grpc": 1, "uses_tls": False}))
    assert main(["health", "--url", str(path), "--protocol", "http"]) == 1
    assert f"127.0.0.1:{port}: no server answers there" in capsys.readouterr().err
    path.unlink()
    assert main(["health", "--url", str(path)]) == 1
    assert "endpoint.json" in capsys.readouterr().err
