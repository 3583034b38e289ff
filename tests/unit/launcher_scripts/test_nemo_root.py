"""A root written for the NeMo launcher, with the keys of its releases 23.04 to 24.05."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import Composition, compose_config
from launcher_scripts.main import main
from tests.conftest import ROOT
from tests.nemo_conf import write_nemo_conf


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Return a folder of configuration files like the NeMo launcher's."""
    return write_nemo_conf(tmp_path / "conf")


def compose(conf: Path, *words: str) -> Composition:
    arguments = read_arguments([f"--config-path={conf}", *words])
    assert arguments.problems == ()
    assert arguments.root.folder == conf
    return compose_config(arguments.overrides, arguments.root)


def test_its_keys_count_and_missing_ones_have_our_defaults(conf: Path) -> None:
    composition = compose(conf, "stages=[export]")
    assert composition.problems == ()
    config = composition.config
    assert config is not None
    assert (config.cluster.account, config.cluster.gpus_per_node) == ("team", 4)
    assert config.cluster.mpi == "pmix"
    assert config.deploy.host == "0.0.0.0"  # other nodes reach the server
    assert config.env_vars["TRANSFORMERS_OFFLINE"] == 0
    assert config.env_vars["HF_HUB_OFFLINE"] == 1
    assert config.launcher_scripts_path == str(ROOT / "launcher_scripts")
    assert (config.container, config.evaluate.tasks) == ("registry/image:1", ["lambada"])
    (note,) = composition.notes
    assert note == (
        f"{conf}/config.yaml: not part of this pipeline: conversion, data_preparation, evaluation, "
        "peft, training, wandb_api_bcp_secret_key"
    )


def test_files_and_clusters_are_chosen_from_both_folders(conf: Path) -> None:
    config = compose(conf, "cluster_type=interactive", "export=gpt3/sample").config
    assert config is not None
    assert config.cluster_type == "local"
    assert config.deploy.host == "127.0.0.1"
    assert config.export.run.model_train_name == "gpt_books_5m"


def test_words_about_other_stages_are_left_out(conf: Path) -> None:
    composition = compose(
        conf, "training=gpt3/126m", "training.run.nodes=2", "+peft.x=1", "stages=[export]"
    )
    assert composition.problems == ()
    (problem,) = compose(conf, "trainings.run.nodes=2").problems
    assert problem.startswith("trainings.run.nodes=2: unknown key")


def test_the_command_takes_it(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"--config-path={conf}", "cluster_type=local", "export=gpt3/sample", "dry_run=true",
        f"base_results_dir={tmp_path}/r",
    ]  # fmt: skip
    assert main(words) == 2
    assert "stages names 'training', which is not a stage" in capsys.readouterr().err
    assert main([*words, "stages=[export]"]) == 0
    seen = capsys.readouterr().out
    assert seen.count("not part of this pipeline") == 1
    assert "numa_mapping is accepted for compatibility" in seen
