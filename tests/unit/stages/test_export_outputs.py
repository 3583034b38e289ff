"""Models in the repository of an export, by the kind of the checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from export_scripts.triton.object_store import parse_location
from export_scripts.triton.repository import RepositoryRequest
from stages.base import JobSettings
from stages.export import ExportStage

TEXT = ["preprocessing", "postprocessing", "ensemble"]


def stage(tmp_path: Path, kind: str, **options: Any) -> ExportStage:
    known = {name: options.pop(name) for name in ("publish_to",) if name in options}
    request = RepositoryRequest(
        model_dir=tmp_path / "m",
        tp_size=1,
        pp_size=1,
        max_batch_size=1,
        data_type="fp32",
        **options,
    )
    return ExportStage(JobSettings("export", tmp_path / "job"), request, kind=kind, **known)


@pytest.mark.parametrize(
    ("kind", "options", "around"),
    [
        ("gpt3", {}, TEXT),
        ("gptj", {}, TEXT),
        ("t5", {}, TEXT),
        ("mt5", {}, TEXT),
        ("gpt3", {"ensemble": False}, []),
        ("t5_encoder", {}, ["tokenizer", "text_encoder"]),
        ("t5", {"model_type": "T5-Encoder"}, ["tokenizer", "text_encoder"]),
        ("t5_encoder", {"ensemble": False}, []),
        ("bert", {}, []),
    ],
)
def test_models_follow_the_kind_of_checkpoint(tmp_path, kind, options, around):
    found = [path.parent.name for path in stage(tmp_path, kind, **options).outputs()]
    assert found == ["m", *around]


def test_finished_export_runs_again_to_be_published(tmp_path):
    made = stage(tmp_path, "bert")
    made.outputs()[0].parent.mkdir()
    made.outputs()[0].touch()
    made.mark_finished({"models": ["m"]})
    assert made.finding().marker is not None
    place = parse_location("s3://bucket/x")
    again = stage(tmp_path, "bert", publish_to=place)
    assert again.finding().marker is None
    assert again.finding().changes == ("it was not published to s3://bucket/x when",)
    again.mark_finished({"models": ["m"], "published": place.triton_url})
    assert again.finding().marker is not None
