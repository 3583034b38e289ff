"""Nodes and GPUs of the server's ranks, and refusals before a job exists."""

import pytest

from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import server_config
from launcher_scripts.stage_table import build_stage
from stages.base import Resources
from tests.nvidia_repositories import add_nvidia_model, add_text_models

TP = "export.model.tensor_model_parallel_size"
FREE_PORTS = tuple(f"deploy.{name}_port=0" for name in ("http", "grpc", "metrics"))
PP = "export.triton_deployment.pipeline_model_parallel_size"


def configure(*words: str) -> Config:
    composition = compose_config(["export=gpt3/sample", *words])
    assert composition.config is not None, composition.problems
    return composition.config


def on_cluster(tp_size: int, pp_size: int, *words: str) -> Config:
    return configure(
        "cluster=bcm", "cluster_type=bcm", f"{TP}={tp_size}", f"{PP}={pp_size}", *words
    )


def resources(config: Config) -> Resources:
    return build_stage("deploy", config, Context()).job.resources


def test_ranks_on_one_node_belong_to_the_server_and_hide_other_gpus():
    config = on_cluster(2, 1)
    found = resources(config)
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (1, 1, 2)
    assert server_config(config).visible_devices == "0,1"


def test_granted_gpus_are_not_numbered_anew():
    assert server_config(on_cluster(2, 1, "cluster.exclusive=false")).visible_devices is None


@pytest.mark.parametrize(("engine", "tasks"), [("pytorch", 8), ("fastertransformer", 1)])
def test_several_nodes_run_a_task_per_rank_or_a_server_per_node(engine, tasks):
    found = resources(on_cluster(8, 2, f"deploy.engine={engine}"))
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (2, tasks, 8)


def test_fewer_gpus_of_each_node_take_more_nodes():
    config = on_cluster(2, 2, "cluster.gpus_per_node=2")
    assert resources(config).nodes == 2
    assert server_config(config).nodes == 2


def test_evaluation_alone_cannot_serve_over_several_nodes():
    config = on_cluster(8, 2)
    with pytest.raises(ValueError, match="a model over 2 nodes needs a separate server job"):
        build_stage("evaluate", config, Context())
    build_stage("evaluate", config, Context(frozenset({"deploy"})))


def test_evaluation_alone_has_the_gpus_of_its_server():
    config = on_cluster(4, 1)
    alone = build_stage("evaluate", config, Context()).job.resources
    assert alone.gpus_per_node == resources(config).gpus_per_node == 4
    followed = build_stage("evaluate", config, Context(frozenset({"deploy"}))).job.resources
    assert followed.gpus_per_node is None
    elsewhere = on_cluster(4, 1, "evaluate.server=host:8001")
    assert build_stage("evaluate", elsewhere, Context()).job.resources.gpus_per_node is None


def test_local_gpus_are_counted_and_the_rest_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    found = server_config(configure(f"{TP}=2"))
    assert (found.local_gpus, found.visible_devices) == (3, "3,5")
    assert [*build_stage("deploy", configure(f"{TP}=4"), Context()).check()]
    on_cpu = configure(f"{TP}=4", "+export.triton_deployment.parameters.device=cpu", *FREE_PORTS)
    assert not [*build_stage("deploy", on_cpu, Context()).check()]


def test_server_may_have_an_image_of_its_own():
    config = on_cluster(1, 1, "container=all", "deploy.container=server")
    assert (config.image_of("deploy"), config.image_of("export")) == ("server", "all")


def test_repository_from_elsewhere_brings_its_own_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    parameters = {"model_type": "GPT-J", "tensor_para_size": "2", "pipeline_para_size": "1"}
    add_nvidia_model(tmp_path, "gptj", parameters | {"data_type": "fp16"})
    add_text_models(tmp_path)
    words = (f"deploy.repository={tmp_path}", f"{TP}=8")
    found = server_config(configure(*words))
    assert (found.tp_size, found.pp_size, found.visible_devices) == (2, 1, "0,1")
    assert resources(on_cluster(8, 2, words[0])).nodes == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (problem,) = build_stage("deploy", configure(*words, *FREE_PORTS), Context()).check()
    assert problem.startswith(f"deploy.repository={tmp_path} was made for 2 x 1 = 2 GPUs")


def test_place_in_a_store_stays_as_it_is_written():
    config = configure("deploy.repository=s3://http://s:9000/bucket/x")
    assert server_config(config).source == "s3://http://s:9000/bucket/x"


@pytest.mark.parametrize(("kind", "ensemble"), [("gpt3", "ensemble"), ("bert", None)])
def test_evaluation_asks_the_ensemble_that_the_kind_has(kind, ensemble):
    stage = build_stage("evaluate", configure(f"export.run.model_type={kind}"), Context())
    assert stage.options.ensemble_name == ensemble  # type: ignore[attr-defined]


def test_pytriton_serves_texts_on_one_node(tmp_path):
    words = ("deploy.server=pytriton", "deploy.interface=nemo", *FREE_PORTS)
    found = server_config(configure(*words))
    assert (found.server, found.interface) == ("pytriton", "nemo")
    stage = build_stage("deploy", configure(*words), Context())
    assert not [*stage.check()]
    wide = build_stage("deploy", on_cluster(8, 2, *words), Context())
    assert any(each.startswith("a model over 2 nodes: ") for each in wide.check())


def test_a_tritonserver_that_is_not_there_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_SERVER", str(tmp_path))
    for word in ("deploy.server=tritonserver", "deploy.repository=s3://bucket/x"):
        (problem,) = build_stage("deploy", configure(word, *FREE_PORTS), Context()).check()
        assert problem.startswith(f"deploy needs a tritonserver: TRITON_SERVER={tmp_path} is")
    dry = configure("deploy.server=tritonserver", "dry_run=true", *FREE_PORTS)
    assert not [*build_stage("deploy", dry, Context()).check()]
