"""The stage that certifies a folder: what it refuses before it starts, and how it ends."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.certify.certificate import Certificate
from inference.certify.findings import Part
from inference.certify.options import CertifySection
from stages.base import JobSettings, StageError
from stages.certify import CertifyStage
from stages.deploy_config import DeployConfig
from stages.endpoint import ServerEndpoint
from tests.tiny_transformers import write_model


def stage(source: Path, folder: Path, output: Path, **options: Any) -> CertifyStage:
    section = CertifySection("certify", "1:00", output_dir=str(output), layers=False)
    section = replace(section, **options)
    job = JobSettings(name="certify", folder=output / "job")
    return CertifyStage(job, options=section, source=source, folder=folder, from_convert=False)


def test_sound_folder_is_finished_and_not_done_again(tmp_path):
    source = write_model("llama", tmp_path / "source")
    folder = shutil.copytree(source, tmp_path / "folder")
    own = stage(source, folder, tmp_path / "out")
    assert not [*own.check()]
    (tmp_path / "out" / "job").mkdir(parents=True)
    assert own()["verdict"] == "equal"
    assert all(path.exists() for path in own.outputs())
    assert own.finding().marker is not None
    again = stage(source, folder, tmp_path / "out", tolerance=0.5)
    assert again.finding().changes


def test_difference_ends_the_stage_with_the_verdict(tmp_path):
    source = write_model("llama", tmp_path / "source")
    folder = shutil.copytree(source, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    (tmp_path / "out" / "job").mkdir(parents=True)
    with pytest.raises(StageError, match="differs: layernorm_eps") as caught:
        stage(source, folder, tmp_path / "out")()
    assert caught.value.exit_code == 1


def test_server_of_what_is_exported_is_asked_and_ended(tmp_path, monkeypatch):
    asked: list[CertifySection] = []
    running: list[str] = []

    @contextmanager
    def serving(*_: object, **__: object) -> Iterator[tuple[None, ServerEndpoint]]:
        running.append("server")
        yield None, ServerEndpoint("node", 8000, 8001, 0, "m", None, "1", 1, 1, "now")
        running.clear()

    def certify(options: CertifySection, *_: object) -> Certificate:
        assert running
        asked.append(options)
        return Certificate({}, (Part("served", "rows"),), (), options, ())

    monkeypatch.setattr("stages.certify.serving", serving)
    monkeypatch.setattr("inference.certify.certify.certify", certify)
    deploy = DeployConfig(folder=tmp_path, model_name="fastertransformer")
    own = replace(stage(tmp_path, tmp_path, tmp_path / "out"), deploy=deploy)
    own.options = replace(own.options, protocol="grpc", token_file=tmp_path / "token")
    (tmp_path / "out" / "job").mkdir(parents=True)
    assert own()["verdict"] == "equal"
    assert (running, asked[0].endpoint, asked[0].model) == ([], "node:8001", "fastertransformer")


def test_what_is_missing_is_named_before_the_start(tmp_path):
    own = stage(tmp_path / "a", tmp_path / "b", tmp_path, training=str(tmp_path / "c"))
    found = "\n".join(own.check())
    for key in ("certify.folder", "certify.source", "certify.training", "certify.endpoint"):
        assert key in found


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"endpoint": ""}, "certify.endpoint="),
        ({"endpoint": "ftp://a"}, "certify.endpoint="),
        ({"endpoint": "http://a:99999/v1"}, "certify.endpoint="),
        ({"endpoint": "http://a:1/v1", "batch_sizes": []}, "certify.batch_sizes "),
        ({"endpoint": "http://a:1/v1", "token_file": Path("/nope")}, "certify.token_file="),
        ({"token_file": Path("/nope")}, "certify.token_file "),
    ],
)
def test_server_that_cannot_be_asked_is_refused(tmp_path, options, key):
    (problem,) = stage(tmp_path, tmp_path, tmp_path, **options).check()
    assert problem.startswith(key)
