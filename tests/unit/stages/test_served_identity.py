"""The words of endpoint.json for what a server serves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import serving


@pytest.mark.parametrize(
    ("said", "published"),
    [
        ({"checkpoint": "1f", "data_type": "bf16"}, {"checkpoint": "1f", "data_type": "bf16"}),
        ({"checkpoint": "", "data_type": "bf16"}, {"checkpoint": "of 1-gpu", "data_type": "bf16"}),
        ({}, {}),
    ],
)
def test_it_is_what_the_server_says_and_what_only_this_machine_can_read(
    said, published, monkeypatch
):
    monkeypatch.setattr(serving, "checkpoint_hash", lambda folder: f"of {folder.name}")
    config: Any = SimpleNamespace(weights_dir=Path("1-gpu"))
    server: Any = SimpleNamespace(identity=lambda _: said)
    assert serving._served_by(config, server, "m") == published
