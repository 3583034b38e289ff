"""Values without effect next to others: refused or noted by a table of keys and what they need."""

from __future__ import annotations

import re

import pytest

from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.effects import _TABLE, notes_of_effects, problems_of_effects
from launcher_scripts.configuration.schema import KEYS, SECTIONS, Config


def configure(words: str) -> Config:
    composition = compose_config(["export=gpt3/sample", *words.split()])
    assert composition.config is not None, composition.problems
    return composition.config


@pytest.mark.parametrize(
    ("idle", "cure"),
    [
        ("run_dir=/x", "action=logs"),
        ("action=watch export.run.training_dir=/x cluster_type=bcp", "cluster_type=local"),
        ("action=watch export.run.training_dir=null", "export.run.training_dir=/x"),
        (
            "action=watch export.run.training_dir=/x watch.exchange=true stages=[convert,evaluate]",
            "stages=[convert,deploy,evaluate]",
        ),
        (
            "action=watch export.run.training_dir=/x watch.exchange=true "
            "export.triton_deployment.interactive=true",
            "watch.exchange=false",
        ),
        ("deploy.uptime=2-0", "cluster_type=bcm"),
        (
            "cluster_type=bcm deploy.uptime=2-0 export.triton_deployment.interactive=true",
            "export.triton_deployment.interactive=false",
        ),
        ("cluster_type=bcm deploy.uptime=2-0 cluster.dependency=singleton", "deploy.uptime=null"),
        ("deploy.container=x", "cluster_type=kubernetes"),
        ("evaluate.shared_server=/x evaluate.server=a:1", "evaluate.server=null"),
        ("deploy.vllm={dtype:half}", "deploy.engine=vllm"),
        ("deploy.engine=openai deploy.vllm={dtype:half}", "deploy.engine=vllm"),
        ("deploy.executable=/next/vllm", "deploy.engine=vllm"),
        ("deploy.engine=vllm deploy.command=[x]", "deploy.engine=openai"),
        ("deploy.engine=openai deploy.token_file=/x", "deploy.engine=vllm"),
        ("deploy.engine=vllm deploy.max_request_mb=7", "deploy.engine=pytorch"),
        ("deploy.engine=vllm deploy.otlp_collector=x", "deploy.engine=fastertransformer"),
        ("cluster_type=bcm deploy.server=pytriton deploy.uptime=2-0", "deploy.server=slipway"),
        ("deploy.server=pytriton deploy.repository=/x", "deploy.server=slipway"),
        ("deploy.server=slipway deploy.repository=s3://a/b", "deploy.server=auto"),
        ("deploy.engine=fastertransformer deploy.server=slipway", "deploy.server=tritonserver"),
        ("deploy.engine=fastertransformer deploy.openai.enabled=true", "deploy.engine=pytorch"),
        ("deploy.openai.access_log=true", "deploy.openai.enabled=true"),
        ("deploy.interface=nemo", "deploy.server=pytriton"),
        ("cluster_type=bcm deploy.handover_s=60", "deploy.uptime=2-0"),
        ("evaluate.boolq.prompt.task_id=3", "evaluate.tasks=[lambada,boolq]"),
        ("evaluate.openai.chat=true", "evaluate.protocol=openai"),
        ("evaluate.openai.chat=true", "evaluate.tasks=[harness:x]"),
        ("evaluate.baseline_path=/x", "evaluate.baseline=update"),
        ("cluster=bcm cluster_type=bcm container_mounts=[/a]", "container=x"),
        ("cluster=bcm cluster_type=bcm container_mounts=[/a]", "deploy.container=x"),
        (
            "cluster=bcm cluster_type=bcm cluster.srun_args=['--container-env=A']",
            "cluster.srun_args=['--container-env=A','--container-name=b']",
        ),
    ],
)
def test_values_without_effect_are_refused_with_what_they_need(idle: str, cure: str) -> None:
    (problem,) = problems_of_effects(configure(idle))
    key, _, rest = problem.partition("=")
    assert f" {key}=" in f" {idle}"
    assert " needs " in rest
    assert [*problems_of_effects(configure(f"{idle} {cure}"))] == []


def test_what_a_file_gives_for_all_clusters_is_no_problem() -> None:
    for words in ("", "cluster=bcm cluster_type=bcm", "cluster=kubernetes cluster_type=kubernetes"):
        config = configure(words)
        assert [*problems_of_effects(config), *notes_of_effects(config)] == []


def test_what_another_cluster_uses_is_noted() -> None:
    words = "cluster.partition=x cluster.comment=y cluster.kubernetes.claim=z watch.parallel=2"
    assert [*notes_of_effects(configure(words))] == [
        "without effect: watch.parallel (it needs action=watch)",
        "without effect: cluster.kubernetes.claim (it needs cluster_type=kubernetes)",
        "without effect: cluster.partition, cluster.comment (it needs cluster_type=bcm)",
    ]


def test_every_name_in_the_table_is_a_key() -> None:
    rows = [*_TABLE["refused"], *_TABLE["noted"]]
    needs = [need for _, *others in rows for need in others if need is not None]
    terms = [term for keys, *_ in rows for term in keys]
    terms += [term for need in needs for term in re.split(" and | or ", need)]
    assert {term.partition("=")[0] for term in terms} <= {*KEYS, *SECTIONS}
