"""Names of places in an object store."""

import pytest

from export_scripts.triton import object_store
from export_scripts.triton.object_store import parse_location, publish_repository
from foundations.errors import first_names


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a/b",
        "s3://bucket",
        "s3://http://127.0.0.1:5005/bucket/a",
        "s3://https://s:443/b",
    ],
)
def test_places_are_named_as_triton_wants_them(url):
    assert parse_location(url).triton_url == url
    assert parse_location(f"{url}/").triton_url == url


@pytest.mark.parametrize(
    "url", ["gs://bucket/a", "s3://", "/data/repo", "s3://b/a?x=1", "s3://localhost:5005/bucket"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"is not of the form s3://bucket/prefix"):
        parse_location(url)


def test_folder_without_models_is_refused_before_the_store_is_asked(tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        publish_repository(tmp_path, parse_location("s3://bucket"))


def test_models_that_change_are_hidden_before_anything_of_them_goes(tmp_path):
    class Stored:
        def objects(self) -> dict[str, int]:
            return {"m/1/old.bin": 1, "m/config.pbtxt": 1, "a/1/gone.bin": 1, "a/config.pbtxt": 1}

        def holds(self, *_: object) -> bool:
            return False

    files = {name: tmp_path / name for name in ("m/1/new.bin", "m/config.pbtxt")}
    _, delete, _ = object_store._changes(files, Stored())  # type: ignore[arg-type]
    assert delete == ["a/config.pbtxt", "m/config.pbtxt", "a/1/gone.bin", "m/1/old.bin"]


def test_names_in_a_bucket_do_not_reach_the_terminal_as_they_are():
    names = ["a\x1b[2Jb", "\u202e../..", "é/ü"]
    assert first_names(names) == "a\\x1b[2Jb, \\u202e../.., é/ü"
