"""The reader of JSON that others wrote."""

import pytest

from foundations.files.json_content import json_object


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_an_object_is_read_in_every_encoding_of_json(encoding):
    assert json_object('{"ü": 1}'.encode(encoding), "a.json") == {"ü": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value at column 1"),
        (b'{"a": 1,\n"b"}', "at line 2, column 4"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b'{"a": ' + b"[" * 100_000, "it is nested too deep"),
        (b"[]", "it is of type list"),
        ("null", "it is of type NoneType"),
    ],
)
def test_anything_else_is_refused_by_name(content, reason):
    with pytest.raises(ValueError, match=r"^a\.json is not a JSON object: .*; copy it$") as caught:
        json_object(content, "a.json", remedy="copy it")
    assert reason in str(caught.value)
