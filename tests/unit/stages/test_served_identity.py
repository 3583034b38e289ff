"""The words of endpoint.json for what a server serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foundations import __version__
from stages.serving import served_by

CONFIG = 'parameters { key: "data_type" value: { string_value: "bf16" } }'


def test_it_comes_from_the_repository_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(folder=tmp_path, weights_dir=tmp_path / "none")
    unknown = {"checkpoint": "", "data_type": "", "quantization": "none", "version": __version__}
    assert served_by(config, "m") == unknown
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    assert served_by(config, "m") == unknown | {"data_type": "bf16"}
    (tmp_path / "m" / "config.pbtxt").write_text("{")
    assert served_by(config, "m") == unknown
