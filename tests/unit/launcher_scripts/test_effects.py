"""Values without effect next to others: refused or noted by a table of keys and what they need."""

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
        ("deploy.container=x", "cluster_type=bcm"),
        ("action=watch export.run.training_dir=/x deploy.keep=true", "action=run"),
        (
            "stages=[deploy] cluster_type=kubernetes cluster.kubernetes.claim=c",
            "deploy.container=x",
        ),
        ("stages=[deploy] cluster_type=kubernetes container=x", "deploy.repository=s3://a/b"),
        ("stages=[deploy] deploy.engine=vllm", "convert.format=huggingface"),
        ("stages=[deploy] deploy.engine=openai", "deploy.repository=/x"),
        ("stages=[evaluate] deploy.engine=vllm", "evaluate.server=a:1"),
        ("stages=[deploy] deploy.engine=vllm convert.format=peft", "deploy.repository=/x"),
        (
            "stages=[deploy] deploy.engine=vllm convert.format=huggingface convert.fp8=block "
            "export.triton_deployment.data_type=fp32",
            "deploy.vllm={dtype:half}",
        ),
        ("stages=[certify] convert.format=torch_dist", "certify.folder=/x"),
        ("stages=[certify] certify.serve=true certify.endpoint=a:1", "certify.serve=false"),
        ("stages=[certify] certify.serve=true", "certify.protocol=grpc"),
        ("stages=[certify] certify.serve=true", "deploy.openai.enabled=true"),
        ("stages=[deploy,certify] certify.endpoint=http://host:8003/v1", "stages=[certify]"),
        ("stages=[deploy,evaluate] evaluate.server=host:8001", "evaluate.server=null"),
        (
            "stages=[export,deploy] export.accuracy.enabled=true evaluate.server=host:8001",
            "stages=[export]",
        ),
        ("action=upgrade stages=[deploy]", "stages=[evaluate]"),
        ("cluster_type=kubernetes container=x stages=[export]", "cluster_type=bcm"),
        ("stages=[evaluate] deploy.server=pytriton", "evaluate.server=a:1"),
        ("stages=[evaluation] evaluate.protocol=openai", "deploy.openai.enabled=true"),
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
        ("deploy.repository=s3://a/b deploy.openai.enabled=true", "deploy.openai.tokenizer=/x"),
        ("deploy.interface=nemo", "deploy.server=pytriton"),
        ("cluster_type=bcm deploy.handover_s=60", "deploy.uptime=2-0"),
        ("evaluate.harness.batch_size=3", "evaluate.tasks=[lambada,harness:x]"),
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
def test_values_without_effect_are_refused_with_what_they_need(idle, cure):
    problems = [*problems_of_effects(configure(idle))]
    assert problems
    assert any(f" {problem.partition('=')[0]}=" in f" {idle}" for problem in problems)
    cured = {*problems_of_effects(configure(f"{idle} {cure}"))}
    assert cured.isdisjoint(problems)


def test_what_a_file_gives_for_all_clusters_is_no_problem():
    for words in ("", "cluster=bcm cluster_type=bcm", "cluster=bcp cluster_type=bcp"):
        config = configure(words)
        assert [*problems_of_effects(config), *notes_of_effects(config)] == []


def test_what_another_cluster_uses_is_noted():
    words = "cluster.partition=x cluster.comment=y cluster.kubernetes.claim=z watch.parallel=2"
    assert [*notes_of_effects(configure(words))] == [
        "without effect: watch.parallel (it needs action=watch)",
        "without effect: cluster.kubernetes.claim (it needs cluster_type=kubernetes)",
        "without effect: cluster.partition, cluster.comment (it needs cluster_type=bcm)",
    ]


def test_needs_are_said_without_patterns():
    for words, need in (
        ("run_dir=/x", " needs action=status, logs or cancel; set that"),
        ("evaluate.harness.batch_size=3", " needs harness:... in evaluate.tasks; set that"),
        (
            "stages=[deploy] deploy.engine=vllm convert.format=peft",
            "deploy.engine=vllm, and cluster_type=local, bcm or bcp, and deploy.repository;",
        ),
    ):
        assert any(need in problem for problem in problems_of_effects(configure(words))), words


def test_every_name_in_the_table_is_a_key():
    rows = [*_TABLE["refused"], *_TABLE["noted"]]
    needs = [need for _, *others in rows for need in others if need is not None]
    terms = [term for keys, *_ in rows for term in keys]
    terms += [term for need in needs for term in re.split(" and | or ", need)]
    assert {term.partition("=")[0] for term in terms} <= {*KEYS, *SECTIONS}
