"""One of several checkpoints chosen by its name, and models of the hub by their id."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from export_scripts.checkpoints import open_checkpoint
from export_scripts.conversion.convert import check_conversion, convert
from export_scripts.conversion.hub import cached_model, hub_advice, hub_id
from export_scripts.conversion.request import ConversionRequest, request_problems
from tests.arrays import loaded
from tests.tiny import gpt_tensors, nemo_members, write_nemo
from tests.tiny_transformers import write_model

NORM = "model.language_model.encoder.final_layernorm.weight"


def write_run(folder: Path, *names: str) -> Path:
    """Write a run's folder for TP 2 in which each checkpoint has weights of its own."""
    for number, name in enumerate(names):
        for member, data in nemo_members(gpt_tensors(seed=number), tp=2).items():
            path = folder / member.replace("model_weights.ckpt", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


def norm_of(path: Path, name: str | None) -> list[float]:
    return loaded(open_checkpoint(path, name=name).tensors[NORM][0]).tolist()


@pytest.mark.parametrize("name", ["gpt--step=100.ckpt", "gpt--step=100", "*step=100*"])
def test_weights_of_a_run_are_chosen_by_name_or_pattern(tmp_path, name):
    run = write_run(tmp_path / "run", "gpt--step=100.ckpt", "gpt--step=200-last.ckpt")
    assert norm_of(run, name) == gpt_tensors(seed=0)[NORM].tolist()
    for last in (None, "latest"):
        assert norm_of(run, last) == gpt_tensors(seed=1)[NORM].tolist()


def test_a_name_that_fits_none_or_several_is_refused(tmp_path):
    run = write_run(tmp_path / "run", "gpt--step=100.ckpt", "gpt--step=200-last.ckpt")
    with pytest.raises(ValueError, match=r"step=7 is none of its checkpoints; it has gpt--step=1"):
        open_checkpoint(run, name="step=7")
    with pytest.raises(ValueError, match=r"gpt--step=\*.ckpt names several"):
        open_checkpoint(run, name="gpt--step=*.ckpt")


def test_archives_of_a_folder_are_chosen_by_name(tmp_path):
    for number in (0, 1):
        write_nemo(tmp_path / f"gpt_{number}.nemo", gpt_tensors(seed=number))
    assert norm_of(tmp_path, "gpt_1.nemo") == gpt_tensors(seed=1)[NORM].tolist()
    assert norm_of(tmp_path / "gpt_1.nemo", "gpt_*") == gpt_tensors(seed=1)[NORM].tolist()
    with pytest.raises(ValueError, match=r"holds 2 archives: gpt_0.nemo, gpt_1.nemo; name one"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"gpt_\* names several checkpoints, gpt_0.nemo, gpt_1"):
        open_checkpoint(tmp_path, name="gpt_*")


@pytest.mark.parametrize("name", ["gpt.nemo", "g*", None])
def test_a_check_unpacks_no_large_archive(tmp_path, name, monkeypatch):
    """However it is named: that takes minutes, in which the command seems to hang."""
    (tmp_path / "source").mkdir()
    source = write_nemo(tmp_path / "source/gpt.nemo", gzip=True)
    monkeypatch.setattr("export_scripts.conversion.convert._QUICK_GZIP_BYTES", 1000)
    monkeypatch.setattr("export_scripts.checkpoints.containers._gunzip", None)
    request = ConversionRequest(source, tmp_path / "out", 1, "fp32")
    if name is not None:
        request = replace(request, checkpoint_path=source.parent, checkpoint_name=name)
    assert check_conversion(request) == []
    assert check_conversion(replace(request, prompt_checkpoints=(source,))) == []


def test_another_format_has_no_names_within(tmp_path):
    source = write_model("gpt2", tmp_path / "source")
    with pytest.raises(
        ValueError, match="is a single huggingface checkpoint; it holds none named x"
    ):
        open_checkpoint(source, name="x")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the cache of the hub, with one model; the working directory is elsewhere."""
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    root = tmp_path / "hf/hub/models--someone--tiny-gpt2"
    write_model("gpt2", root / "snapshots/0123abcd")
    (root / "refs").mkdir()
    (root / "refs/main").write_text("0123abcd")
    return root


def test_an_id_stands_for_its_cached_folder(cache):
    folder = cache / "snapshots/0123abcd"
    assert cached_model(Path("someone/tiny-gpt2")) == folder
    assert cached_model(Path.cwd() / "someone/tiny-gpt2") == folder
    assert open_checkpoint(folder).tensors["transformer.wte.weight"]


def test_a_path_is_never_taken_for_an_id(cache, tmp_path):
    shutil.copytree(cache / "snapshots/0123abcd", Path("someone/tiny-gpt2"))
    assert cached_model(Path("someone/tiny-gpt2")) == Path("someone/tiny-gpt2")
    for text in ("/elsewhere/tiny-gpt2", "a/b/c", "gpt2.nemo", str(tmp_path / "x/y")):
        assert hub_id(Path(text)) is None
        assert cached_model(Path(text)) == Path(text)
        assert hub_advice(Path(text)) == ""


def test_an_id_that_is_not_cached_is_answered_with_what_to_do(cache):
    request = ConversionRequest(Path("someone/other"), Path("out"), 1, "fp32")
    (problem,) = request_problems(request)
    assert problem.startswith("--checkpoint-path=someone/other does not exist; ")
    assert "`hf download someone/other`" in problem
    assert str(cache.parent) in problem


def test_a_folder_of_one_checkpoint_is_not_taken_for_that_of_another(tmp_path):
    run = write_run(tmp_path / "run", "gpt--step=100.ckpt", "gpt--step=200-last.ckpt")
    request = ConversionRequest(run, tmp_path / "out", 1, "fp32")
    convert(request)
    assert convert(replace(request, checkpoint_name="latest")).already_done
    with pytest.raises(ValueError, match="holds another conversion"):
        convert(replace(request, checkpoint_name="gpt--step=100.ckpt"))


def test_a_folder_of_one_family_is_not_taken_for_that_of_another(tmp_path):
    request = ConversionRequest(write_model("t5", tmp_path / "t5"), tmp_path / "out", 1, "fp32")
    assert convert(replace(request, model_type="t5")).family == "t5"
    with pytest.raises(ValueError, match="holds another conversion"):
        convert(replace(request, model_type="t5_encoder"))
