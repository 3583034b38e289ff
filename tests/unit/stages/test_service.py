"""A server that is kept running: requests to reload and to end, without a real server."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from inference.system.parent_process import stop_signals
from stages import service
from stages.base import StageError
from stages.deploy_config import DeployConfig
from stages.endpoint import ENDPOINT_NAME, RELOAD_NAME, STOP_NAME, ServerEndpoint
from stages.progress import Progress, write_json


class FakeServer:
    """Serves until it is stopped; keeps the time that its requests get to finish."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.drain_s: float | None = None
        self.used_at = 0.0

    def failure(self) -> None:
        """Nothing is lost."""

    def ended_within(self, limit_s: float) -> bool:
        time.sleep(limit_s)
        return False

    def last_used(self) -> float:
        return self.used_at

    def reload(
        self,
        *,
        timeout_s: float,
        check: Callable[[], None],
        repository: str | None,
        exchanges: bool,
    ) -> None:
        assert timeout_s
        assert repository is None
        assert not exchanges
        check()

    def stop(self, *, drain_s: float) -> None:
        self.drain_s = drain_s


MINE = ServerEndpoint("here", 1, 2, 3, "m", None, "7", 1, 1, "now")


def serve(monkeypatch: pytest.MonkeyPatch, start: Callable[[], FakeServer]) -> None:
    """Let a service serve with what `start` returns."""

    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Any]:
        yield start(), MINE

    monkeypatch.setattr(service, "serving", serving)


def new_service(folder: Path, config: DeployConfig) -> service.Service:
    return service.Service(config, folder, Progress(), until=time.monotonic() + 600)


def test_server_that_should_end_while_it_loads_anew_finishes_its_requests(tmp_path, monkeypatch):
    class Loading(FakeServer):
        def reload(self, *, check: Callable[[], None], **_: Any) -> None:
            (tmp_path / STOP_NAME).touch()
            check()

    server = Loading(tmp_path / "log")

    def start() -> FakeServer:
        (tmp_path / RELOAD_NAME).touch()
        return server

    serve(monkeypatch, start)
    kept = new_service(tmp_path, DeployConfig(folder=tmp_path, model_name="m", drain_s=17.0))
    assert kept.run() == "no longer needed"
    assert server.drain_s == 17.0
    assert not (tmp_path / ENDPOINT_NAME).exists()


@pytest.mark.parametrize(("steady_s", "starts"), [(600.0, 3), (0.0, 8)])
def test_failures_before_sound_service_are_forgotten(steady_s, starts, tmp_path, monkeypatch):
    servers: list[FakeServer] = []

    class Failing(FakeServer):
        def failure(self) -> str:  # type: ignore[override]
            time.sleep(0.01)
            return "it has failed"

    def start() -> FakeServer:
        servers.append(Failing(tmp_path / "log"))
        if len(servers) == 8:
            (tmp_path / STOP_NAME).touch()
        return servers[-1]

    serve(monkeypatch, start)
    monkeypatch.setattr(service, "_STEADY_S", steady_s)
    config = DeployConfig(folder=tmp_path, model_name="m", max_restarts=2, restart_backoff_s=0.01)
    kept = new_service(tmp_path, config)
    if starts == 8:
        assert kept.run() == "no longer needed"
    else:
        with pytest.raises(StageError, match="failed again after 2 restarts"):
            kept.run()
    assert len(servers) == starts


def test_server_with_a_successor_stays_for_those_who_still_use_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_JOB_ID", "7")
    endpoint = tmp_path / ENDPOINT_NAME
    server = FakeServer(tmp_path / "log")
    until = time.time() + 1.5

    def used() -> float:
        (tmp_path / STOP_NAME).touch()  # it is for the successor
        return min(time.time(), until)

    server.last_used = used  # type: ignore[method-assign]

    def publish(endpoint: ServerEndpoint, path: Path) -> None:
        write_json(path, asdict(endpoint) | {"job_id": "8"})

    serve(monkeypatch, lambda: server)
    monkeypatch.setattr(ServerEndpoint, "publish", publish)
    config = DeployConfig(folder=tmp_path, model_name="m", drain_s=0.5, uptime_s=9e9)
    assert new_service(tmp_path, config).run() == "handed over"
    assert time.time() > until + 0.5
    assert server.drain_s is not None
    assert server.drain_s > 500  # all that is left of its time
    assert endpoint.exists()
    assert (tmp_path / STOP_NAME).exists()


def test_server_stays_where_a_damaged_repository_stops_a_reload(tmp_path, monkeypatch, capsys):
    class Loading(FakeServer):
        def reload(self, **options: Any) -> None:
            assert not options["exchanges"]
            (tmp_path / STOP_NAME).write_text("\n")  # as `echo` writes it
            raise ValueError("config.ini is damaged")

    server = Loading(tmp_path / "log")

    def start() -> FakeServer:
        (tmp_path / RELOAD_NAME).touch()
        return server

    serve(monkeypatch, start)
    kept = new_service(tmp_path, DeployConfig(folder=tmp_path, model_name="m", drain_s=17.0))
    assert kept.run() == "no longer needed"
    assert server.drain_s == 17.0
    said = capsys.readouterr().err
    assert "reload failed; the server continues unchanged: config.ini is damaged" in said


@pytest.mark.parametrize("fails", [False, True])
def test_weights_of_a_named_repository_go_into_the_server_or_into_a_new_one(
    fails, tmp_path, monkeypatch
):
    """A server that does not take them is started again with them: no failure of its own."""
    asked: list[tuple[str, bool]] = []
    served: list[Path] = []

    class Exchanging(FakeServer):
        def reload(self, **options: Any) -> None:
            asked.append((options["repository"], options["exchanges"]))
            if not fails:
                (tmp_path / STOP_NAME).touch()
                return
            raise ValueError("another model")

    @contextmanager
    def serving(config: DeployConfig, *_: Any, **__: Any) -> Iterator[Any]:
        served.append(config.folder)
        if len(served) == 1:
            (tmp_path / RELOAD_NAME).write_text(f"{tmp_path / 'next'}\n")
        else:
            (tmp_path / STOP_NAME).touch()
        yield (
            Exchanging(tmp_path / "log"),
            MINE,
        )

    def endpoint_of(config: DeployConfig, *_: Any) -> ServerEndpoint:
        return ServerEndpoint(str(config.folder), 1, 2, 3, "m", None, "7", 1, 1, "now")

    monkeypatch.setattr(service, "serving", serving)
    monkeypatch.setattr(service, "endpoint_of", endpoint_of)
    config = DeployConfig(folder=tmp_path / "first", model_name="m", max_restarts=0)
    kept = new_service(tmp_path, config)
    assert kept.run() == "no longer needed"
    assert asked == [(str(tmp_path / "next"), True)]
    assert served == [tmp_path / "first", tmp_path / "next"][: 1 + fails]
    assert kept.config.folder == tmp_path / "next"
    assert kept.restarts == 0


def test_server_that_loaded_anew_stays_where_a_full_disk_takes_no_address(
    tmp_path, monkeypatch, capsys
):
    server, publications = FakeServer(tmp_path / "log"), itertools.count(1)

    def start() -> FakeServer:
        (tmp_path / RELOAD_NAME).touch()
        return server

    def publish(endpoint: ServerEndpoint, path: Path) -> None:
        if next(publications) > 1:
            (tmp_path / STOP_NAME).touch()
            raise OSError(28, "No space left on device")
        write_json(path, asdict(endpoint))

    serve(monkeypatch, start)
    monkeypatch.setattr(service, "endpoint_of", lambda *_: MINE)
    monkeypatch.setattr(ServerEndpoint, "publish", publish)
    kept = new_service(tmp_path, DeployConfig(folder=tmp_path, model_name="m", drain_s=17.0))
    assert kept.run() == "no longer needed"
    assert server.drain_s == 17.0
    assert "the address cannot be written" in capsys.readouterr().err


def test_restarted_server_serves_on_a_full_disk_and_publishes_once_there_is_room(
    tmp_path, monkeypatch
):
    full = OSError(28, "No space left on device")
    starts, publications = itertools.count(1), itertools.count(1)

    class Server(FakeServer):
        def __init__(self, number: int) -> None:
            super().__init__(tmp_path / "log")
            self.number = number

        def failure(self) -> str | None:  # type: ignore[override]
            if self.number > 1 and (tmp_path / ENDPOINT_NAME).exists():
                (tmp_path / STOP_NAME).touch()
            return "it has failed" if self.number == 1 else None

    def start() -> FakeServer:
        if (number := next(starts)) == 2:
            raise full
        return Server(number)

    def publish(endpoint: ServerEndpoint, path: Path) -> None:
        if 1 < next(publications) < 4:
            raise full
        write_json(path, asdict(endpoint))

    serve(monkeypatch, start)
    monkeypatch.setattr(service, "_PUBLISH_AGAIN_S", 0.01)
    monkeypatch.setattr(ServerEndpoint, "publish", publish)
    config = DeployConfig(folder=tmp_path, model_name="m", restart_backoff_s=0.01)
    kept = new_service(tmp_path, config)
    assert kept.run() == "no longer needed"
    assert (next(starts), next(publications)) == (4, 5)


def test_progress_that_cannot_be_written_ends_no_work(tmp_path):
    (tmp_path / "file").touch()
    Progress(tmp_path / "file" / "progress.json").update("serving")


@pytest.mark.parametrize(("for_job", "ends"), [("", False), ("8", False), ("7\n", True)])
def test_request_to_end_is_for_the_job_that_serves_or_the_one_it_names(
    tmp_path, monkeypatch, for_job, ends
):
    monkeypatch.setenv("SLIPWAY_JOB_ID", "7")
    serves = ServerEndpoint("here", 1, 2, 3, "m", None, "6", 1, 1, "now")
    write_json(tmp_path / ENDPOINT_NAME, asdict(serves))
    (tmp_path / STOP_NAME).write_text(for_job)
    config = DeployConfig(folder=tmp_path, model_name="m", uptime_s=9e9)
    assert (new_service(tmp_path, config)._end_reason() == "no longer needed") is ends
    assert (tmp_path / STOP_NAME).exists() is not ends


@pytest.mark.timeout(60)
@pytest.mark.parametrize("uptime_s", [None, 9e9])
def test_what_is_no_request_and_no_address_ends_no_server(uptime_s, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_JOB_ID", "7")
    server, looks = FakeServer(tmp_path / "log"), itertools.count()

    def failure() -> None:
        if next(looks) == 2:
            (tmp_path / STOP_NAME).unlink()
            (tmp_path / STOP_NAME).touch()

    server.failure = failure  # type: ignore[method-assign]

    def publish(endpoint: ServerEndpoint, path: Path) -> None:
        del endpoint
        path.write_text("{")

    os.mkfifo(tmp_path / STOP_NAME)
    (tmp_path / RELOAD_NAME).mkdir()
    serve(monkeypatch, lambda: server)
    monkeypatch.setattr(ServerEndpoint, "publish", publish)
    config = DeployConfig(folder=tmp_path, model_name="m", drain_s=0.5, uptime_s=uptime_s)
    assert new_service(tmp_path, config).run() == "no longer needed"
    assert next(looks) > 2
    assert not (tmp_path / ENDPOINT_NAME).exists()


def test_pause_before_the_next_of_very_many_starts_has_a_limit(tmp_path, monkeypatch):
    (tmp_path / STOP_NAME).touch()
    config = DeployConfig(
        folder=tmp_path, model_name="m", max_restarts=5000, restart_backoff_s=0.001
    )
    kept = new_service(tmp_path, config)
    phases: list[str] = []
    monkeypatch.setattr(kept.progress, "update", phases.append)
    kept._failures = 2000
    assert kept._wait("it has failed") == "no longer needed"
    assert phases == ["restarting in 300 s"]


@pytest.mark.parametrize(("failure", "ended"), [("", "no longer needed"), ("lost", "stopped")])
def test_signal_while_a_server_stops_makes_no_other_end_of_it(
    tmp_path, monkeypatch, failure, ended
):
    class Server(FakeServer):
        def failure(self) -> str | None:  # type: ignore[override]
            return failure or None

        def stop(self, *, drain_s: float) -> None:
            super().stop(drain_s=drain_s)
            os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / STOP_NAME).write_text("another job" if failure else "")
    serve(monkeypatch, lambda: Server(tmp_path / "log"))
    kept = new_service(tmp_path, DeployConfig(folder=tmp_path, model_name="m"))
    with stop_signals(signal.SIGTERM) as stopped:
        assert kept.run() == ended
        assert (stopped.is_set(), kept.restarts) == (bool(failure), 0)
