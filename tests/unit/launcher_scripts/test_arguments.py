"""Parsing of a command line, before any file is read."""

from types import SimpleNamespace
from typing import Any

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.schema import CLUSTERS
from launcher_scripts.launchers import make_launcher


@pytest.mark.parametrize(
    "words", [["cluster=bcm"], ["cluster_type=bcm"], ["cluster_type=bcm", "cluster=bcm"]]
)
def test_cluster_and_cluster_type_agree(words):
    assert set(read_arguments(words).overrides) == {"cluster=bcm", "cluster_type=bcm"}


def test_interactive_means_local():
    assert set(read_arguments(["cluster_type=interactive"]).overrides) == {
        "cluster=local",
        "cluster_type=local",
    }


def test_disagreeing_clusters_are_named():
    problems = read_arguments(["cluster_type=bcm", "cluster=bcp"]).problems
    assert problems == ["cluster_type=bcm and cluster=bcp disagree; give one of them."]


def test_unknown_cluster_is_answered_with_the_known_ones():
    (problem,) = compose_config(read_arguments(["cluster_type=bmc"]).overrides).problems
    assert problem == (
        "cluster_type=bmc (did you mean bcm?): expected one of local, bcm, bcp, kubernetes (where "
        "to run)."
    )
    words = read_arguments(["cluster_type=", "cluster=bcm"]).overrides
    (problem,) = compose_config(words).problems
    assert problem.startswith("cluster_type=: expected one of local, ")


def test_the_launcher_s_word_for_kubernetes_is_known():
    arguments = read_arguments(["cluster_type=k8s"])
    assert not arguments.problems
    assert "cluster_type=kubernetes" in arguments.overrides


def test_options_may_stand_between_overrides():
    arguments = read_arguments(["export=gpt3/sample", "--cfg", "job", "dry_run=true"])
    assert arguments.overrides == ["export=gpt3/sample", "dry_run=true"]
    assert arguments.shows


def test_short_options_are_those_of_hydra(tmp_path):
    assert read_arguments(["-c", "job"]).shows
    (problem,) = read_arguments(["-cd", f"{tmp_path}/nope"]).problems
    assert problem.startswith(f"--config-dir={tmp_path}/nope")


def test_option_without_its_value_is_a_problem_and_not_an_exit():
    with pytest.raises(ValueError, match=r"--config-name.* run with --help for the list"):
        read_arguments(["--config-name"])
    (problem,) = read_arguments(["--cfg", "hydra"]).problems
    assert problem.startswith("--cfg hydra")


def test_unknown_option_is_a_problem_and_not_an_exit():
    (problem,) = read_arguments(["--dry-run"]).problems
    assert problem.startswith("unknown argument --dry-run (did you mean dry_run=<value>?)")
    (problem,) = read_arguments(["--confg-name=x"]).problems
    assert problem.startswith("unknown argument --confg-name=x (did you mean --config-name?)")


def test_only_the_option_is_unknown_among_overrides():
    arguments = read_arguments(["dry_run=true", "--nope", "export=gpt3/sample", "--cfg", "job"])
    (problem,) = arguments.problems
    assert problem.startswith("unknown argument --nope")
    assert arguments.overrides == ["dry_run=true", "export=gpt3/sample"]


def test_help_may_be_asked_for_without_dashes():
    assert read_arguments(["help"]).wants_help


def test_name_that_is_not_utf8_is_refused():
    (problem,) = read_arguments(["base_results_dir=/r/\udce9"]).problems
    assert problem.startswith("'base_results_dir=/r/\\udce9' is not valid UTF-8")


def test_folder_of_further_files_has_to_exist(tmp_path):
    assert not read_arguments([f"--config-dir={tmp_path}"]).problems
    (problem,) = read_arguments([f"--config-dir={tmp_path}/nope"]).problems
    assert problem == f"--config-dir={tmp_path}/nope is not a folder."


def test_further_sbatch_options_pass_through():
    words = ["+cluster.begin=now", "+cluster.qos=high", "+cluster.gpus-per-node=4"]
    assert read_arguments(words).overrides == [
        "+cluster.additional_parameters.begin=now",
        "cluster.qos=high",
        "cluster.gpus_per_node=4",  # also places the ranks
    ]


def test_lists_that_cannot_be_read_are_not_taken_for_texts():
    assert read_arguments(["stages=[convert,,export]"]).overrides == ["stages=[convert,,export]"]


def test_every_cluster_that_can_be_named_has_a_launcher():
    configs: list[Any] = [SimpleNamespace(cluster_type=name) for name in CLUSTERS]
    assert tuple(make_launcher(config).name for config in configs) == CLUSTERS
