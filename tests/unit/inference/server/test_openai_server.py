"""Servers of other engines as processes: readiness, a first request, failures, the end."""

import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from inference.front.access import Access
from inference.server.log import ServerStartError
from inference.server.openai_server import OpenAIServer
from inference.server.processes import process_state
from tests.openai_servers import write_program
from tests.waiting import until


def server(tmp_path: Path, *more: str, **changes: Any) -> OpenAIServer:
    command = [*write_program(tmp_path), "{port}", "{model}", *more]
    values: dict[str, Any] = {"model": str(tmp_path), "folder": tmp_path, "host": "127.0.0.1"}
    log = tmp_path / "server.log"
    return OpenAIServer(command, ports={"http": 0}, log_path=log, **(values | changes))


def start(found: OpenAIServer, timeout_s: float = 60.0) -> None:
    found.start(timeout_s=timeout_s, progress=lambda _: None)


def test_a_server_is_ready_once_it_has_answered_and_leaves_nothing_behind(tmp_path):
    with server(tmp_path) as found:
        start(found)
        assert found.ports["http"]
        assert found.failure() is None
        assert found._process is not None
        pid = found._process.pid
    state = process_state(pid)
    assert state is None or state.letter == "Z"
    with pytest.raises(OSError):  # noqa: PT011 - refused, or closed
        http.client.HTTPConnection("127.0.0.1", found.ports["http"], timeout=5).request(
            "GET", "/health"
        )


def test_a_user_may_have_several_servers_at_once(tmp_path):
    with server(tmp_path) as one, server(tmp_path) as other:
        start(one)
        start(other)


def test_the_reason_of_a_failed_start_is_in_the_error(tmp_path):
    with pytest.raises(ServerStartError, match=r"ended with status 1.*\n(.*\n)*.*--wrong-option"):
        start(server(tmp_path, "fails"))
    with pytest.raises(ServerStartError, match=r"status 500.*no such kernel"):
        start(server(tmp_path, "broken"))


def test_a_token_is_sent_with_the_first_request(tmp_path):
    secret = {"VLLM_API_KEY": "a" * 24}
    with pytest.raises(ServerStartError, match="status 401"):
        start(_with(server(tmp_path), secret))
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("a" * 24)
    with _with(server(tmp_path, access=Access(token_file=token_file)), secret) as found:
        start(found)


def _ask(connection: http.client.HTTPConnection, body: str) -> None:
    connection.request("POST", "/v1/completions", body)
    connection.getresponse()


def _with(found: OpenAIServer, env: dict[str, str]) -> OpenAIServer:
    found.env = env
    return found


def test_a_lost_server_is_noticed(tmp_path):
    with server(tmp_path) as found:
        start(found)
        body = json.dumps({"model": str(tmp_path), "prompt": "end"})
        connection = http.client.HTTPConnection("127.0.0.1", found.ports["http"], timeout=10)
        with pytest.raises((http.client.HTTPException, OSError)):
            _ask(connection, body)
        until(lambda: found.poll() is not None)
        assert "ended with status 7" in str(found.failure())


def test_a_server_that_never_answers_runs_out_of_time(tmp_path):
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    found = server(tmp_path)
    found.command = (found.command[0], str(tmp_path / "sleep.py"), "{port}")
    began = time.monotonic()
    with pytest.raises(ServerStartError, match="not ready after 1 s"):
        start(found, timeout_s=1.0)
    assert time.monotonic() - began < 30
