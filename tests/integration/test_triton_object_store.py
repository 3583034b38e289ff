"""A repository in a real S3 server, and a real tritonserver that loads it from there."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from export_scripts.triton.object_store import (
    StoreLocation,
    parse_location,
    publish_repository,
)
from tests.integration.triton_process import DOUBLE, add_model, new_server

pytestmark = [pytest.mark.s3, pytest.mark.triton]

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install boto3")
pytest.importorskip("moto", reason="needs moto: pip install 'moto[s3]'")

BUCKET = "models"


@pytest.fixture
def location(store_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StoreLocation:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "only-for-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=store_endpoint).create_bucket(Bucket=BUCKET)
    return parse_location(f"s3://{store_endpoint}/{BUCKET}/{tmp_path.name}/repo")


def _keys(location: StoreLocation) -> list[str]:
    client = boto3.client("s3", endpoint_url=location.endpoint_url)
    found = client.list_objects_v2(Bucket=location.bucket, Prefix=location.prefix + "/")
    return [entry["Key"].removeprefix(location.prefix + "/") for entry in found.get("Contents", ())]


def test_a_copy_is_whole_and_says_how_far_it_is(location, tmp_path):
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    seen: list[tuple[int, int]] = []
    summary = publish_repository(repository, location, progress=lambda *done: seen.append(done))
    assert summary.files == summary.sent == len(_keys(location)) == 2
    assert seen[-1] == (summary.sent_bytes, summary.sent_bytes)
    with new_server(location.triton_url, tmp_path) as server:
        server.start(timeout_s=240)
        assert server.models == ("double",)
    assert "only-for-tests" not in server.log_path.read_text()


def test_second_copy_sends_nothing_and_a_partial_one_goes_on(location, tmp_path):
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    (repository / "double" / "1" / "weights.bin").write_bytes(os.urandom(20_000_000))
    assert publish_repository(repository, location).sent == 3
    assert publish_repository(repository, location).sent == 0
    client = boto3.client("s3", endpoint_url=location.endpoint_url)
    client.delete_object(Bucket=BUCKET, Key=location.key("double/1/weights.bin"))
    again = publish_repository(repository, location)
    assert (again.sent, again.sent_bytes) == (1, 20_000_000)
    got = client.get_object(Bucket=BUCKET, Key=location.key("double/1/weights.bin"))
    assert np.array_equal(
        np.frombuffer(got["Body"].read(), np.uint8),
        np.frombuffer((repository / "double" / "1" / "weights.bin").read_bytes(), np.uint8),
    )


def test_other_contents_are_kept_unless_overwriting(location, tmp_path):
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    (repository / "double" / "1" / "old.bin").write_bytes(b"old")
    publish_repository(repository, location)
    (repository / "double" / "1" / "old.bin").unlink()
    (repository / "double" / "1" / "model.py").write_text(DOUBLE + "# changed\n")
    with pytest.raises(ValueError, match=r"holds other contents: double/1/model\.py, double/1/old"):
        publish_repository(repository, location)
    summary = publish_repository(repository, location, overwrite=True)
    assert sorted(_keys(location)) == ["double/1/model.py", "double/config.pbtxt"]
    assert summary.sent == 2  # the changed script, and the configuration after it


KILLS = 4  # times 100 in `make soak`


def published_after_kill(repository: Path, location: StoreLocation, pause_s: float) -> None:
    """Publish in a process of its own, and kill it after a moment."""
    child = os.fork()
    if child == 0:
        try:
            publish_repository(repository, location, overwrite=True)
        finally:
            os._exit(0)
    time.sleep(pause_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.soak
def test_models_of_a_publication_killed_at_any_moment_are_whole_or_hidden(location, tmp_path, soak):
    chance = random.Random(5)
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    add_model(repository, "other", DOUBLE)
    files = [repository / "double" / "1" / name for name in ("model.py", "a.bin", "b.bin")]
    client = boto3.client("s3", endpoint_url=location.endpoint_url)

    def stored_version() -> set[bytes]:
        """Return the first bytes of the objects of the model that changes."""
        keys = [f"double/1/{path.name}" for path in files]
        got = [client.get_object(Bucket=BUCKET, Key=location.key(key)) for key in keys]
        return {each["Body"].read()[:9] for each in got}

    def write_version(number: int) -> None:
        for path in files:
            path.write_bytes(b"#%08d" % number + bytes(300_000))

    write_version(0)
    publish_repository(repository, location)
    visible = 0
    for number in range(1, KILLS * soak + 1):
        write_version(number)
        published_after_kill(repository, location, chance.random() * 0.5)
        keys = _keys(location)
        assert "other/config.pbtxt" in keys
        if "double/config.pbtxt" in keys:
            visible += 1
            assert stored_version() in ({b"#%08d" % (number - 1)}, {b"#%08d" % number})
        publish_repository(repository, location, overwrite=True)
        assert stored_version() == {b"#%08d" % number}
    assert soak == 1 or 0 < visible < KILLS * soak  # kills have come in time


def test_missing_bucket_and_unreachable_store_are_reported(location, tmp_path):
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    absent = parse_location(f"s3://{location.endpoint_url}/absent/repo")
    with pytest.raises(OSError, match=r"absent/repo: .*bucket does not exist"):
        publish_repository(repository, absent)
