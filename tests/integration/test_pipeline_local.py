"""The whole way on this machine: the command as users type it, with the bundled model."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from tests.integration import command
from tests.integration.command import FREE_PORTS, finish, processes_of, start
from tests.waiting import until

SMALL = (
    "evaluate.limit=4",
    "evaluate.latency.enabled=false",
    "evaluate.lambada.metrics=[lambada_last_token]",
)
# Two would wait for each other in turns, on the cores of other tests.
ONE_RANK = ("export.model.tensor_model_parallel_size=1",)


def words(results: Path, *more: str) -> list[str]:
    return ["export=gpt3/sample", f"base_results_dir={results}", *more]


def run(results: Path, *more: str) -> tuple[int, str]:
    return command.run(*words(results, *more))


def export_dir(results: Path, summary: str = "tp2_pp1_fp16_fp32") -> Path:
    return results / "gpt_books_5m" / f"export_{summary}"


def weights(results: Path) -> Path:
    return export_dir(results) / "model_repo" / "fastertransformer" / "1" / "2-gpu"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_export_alone_builds_a_complete_repository(tmp_path):
    status, text = run(tmp_path, "stages=[export]", *ONE_RANK)
    assert status == 0, text
    repository = export_dir(tmp_path, "tp1_pp1_fp16_fp32") / "model_repo"
    assert "convert runs first" in text
    assert {path.parent.name for path in repository.glob("*/config.pbtxt")} == {
        "ensemble",
        "fastertransformer",
        "postprocessing",
        "preprocessing",
    }
    assert (repository / "fastertransformer" / "1" / "1-gpu" / "config.ini").is_file()


def test_a_hugging_face_folder_for_other_engines_is_one_option_of_the_stage(tmp_path):
    option = "convert.format=huggingface"
    status, text = run(tmp_path, "stages=[convert]", option)
    assert status == 0, text
    folder = weights(tmp_path).with_name("huggingface")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("gpt2", "float16")
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer_config.json").is_file()
    status, text = run(tmp_path, "stages=[convert]", option)
    assert (status, "finished earlier" in text) == (0, True), text
    status, text = run(tmp_path, "stages=[export]", option)
    assert status == 2
    assert "which a repository cannot hold: run stages=[convert] alone" in text


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of results with the shards."""
    folder = tmp_path_factory.mktemp("converted")
    status, text = run(folder, "stages=[convert]", "+env_vars.NOTE=a b")
    assert status == 0, text
    return folder


def test_job_folder_has_everything_that_users_of_the_launcher_expect(converted):
    results = export_dir(converted)
    assert (results / "results").is_dir()
    assert "stages=[convert]" in (results / "launcher_cmd.log").read_text()
    folder = results / "convert"
    section = yaml.safe_load((folder / "export_gpt_books_5m_config.yaml").read_text())
    assert section["export"]["run"]["results_dir"] == str(results)
    assert section["export"]["model"]["tensor_model_parallel_size"] == 2
    assert "export NOTE='a b'" in (folder / "export_gpt_books_5m_submission.sh").read_text()
    record = json.loads((folder / "job.json").read_text())
    assert (record["state"], record["stage"], record["exit_code"]) == ("completed", "convert", 0)
    assert Path(record["log"]).name == f"log-export_gpt_books_5m_{record['job_id']}.out"
    assert Path(record["log"]).is_file()
    assert record["job_id"] in (folder / "launcher.log").read_text()


def test_saved_configuration_repeats_the_run(converted):
    before = digests(weights(converted))
    saved = export_dir(converted) / "convert"
    root = (f"--config-path={saved}", "--config-name=export_gpt_books_5m_config")
    status, text = command.run(*root, "stages=[convert]")
    assert (status, "finished at" in text) == (0, True), text
    assert digests(weights(converted)) == before


def test_conversion_killed_halfway_and_run_again_gives_the_same_bytes(tmp_path, converted):
    started = start(*words(tmp_path, "stages=[convert]"))
    partial = weights(tmp_path).with_name(".2-gpu.partial")
    until(lambda: partial.exists() or started.poll() is not None, "the first shard")
    started.kill()
    started.communicate()
    until(lambda: not processes_of(tmp_path), "the end of the killed job")
    status, text = run(tmp_path, "stages=[convert]")
    assert status == 0, text
    assert digests(weights(tmp_path)) == digests(weights(converted))


def test_impossible_configuration_is_refused_at_once(tmp_path):
    status, text = run(tmp_path, "stages=[export]", "export.model.tensor_model_parallel_size=3")
    assert status == 2
    assert "export.model.tensor_model_parallel_size=3 does not divide head_num=8" in text
    assert "use 1, 2, 4 or 8" in text
    assert "Traceback" not in text
    assert not any(tmp_path.iterdir())


@pytest.mark.triton
def test_pipeline_serves_measures_and_stops(tmp_path):
    started = start(*words(tmp_path, *FREE_PORTS, *SMALL, *ONE_RANK))
    text = finish(started, timeout_s=240)
    assert started.returncode == 0, text
    results = export_dir(tmp_path, "tp1_pp1_fp16_fp32")
    report = json.loads((results / "results" / "evaluate" / "report.json").read_text())
    assert report
    assert "lambada_last_token" in text
    assert str(results / "results" / "evaluate" / "report.html") in text
    for stage in ("convert", "export", "deploy", "evaluate"):
        record = json.loads((results / stage / "job.json").read_text())
        assert record["state"] == "completed", text
    assert not (results / "deploy" / "endpoint.json").exists()
    assert not processes_of(tmp_path)
    status, text = run(tmp_path, *FREE_PORTS, *SMALL, *ONE_RANK)
    assert status == 0
    assert text.count("finished at") >= 3
    assert "not needed: the evaluation is finished" in text
