"""The manifests for Kubernetes: valid by the published schemas, of the same placement, sound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher_scripts.launchers.kubernetes import object_name
from launcher_scripts.main import main

COMMON = ("export=gpt3/sample", "cluster=kubernetes", "deploy.container=slipway:0.2.0")
CLAIM = ("cluster.kubernetes.claim=models", "cluster.kubernetes.claim_path=gpt/model_repo")
TWO_NODES = (
    "cluster.gpus_per_node=2", "export.model.tensor_model_parallel_size=2",
    "export.triton_deployment.pipeline_model_parallel_size=2",
)  # fmt: skip
INSTANCES = "export.triton_deployment.instance_count"
# The fields of a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1, config/crd of its repository) that
# are written here; its two templates are those of core/v1.
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a repository that is there, so that nothing has to be converted for it."""
    folder = tmp_path / "model_repo"
    (folder / "fastertransformer").mkdir(parents=True)
    (folder / "fastertransformer/config.pbtxt").write_text('name: "fastertransformer"\n')
    return folder


@pytest.fixture
def render(tmp_path, repository: Path, capsys) -> Render:
    def run(*words: str, status: int = 0) -> list[dict[str, Any]]:
        given = (f"base_results_dir={tmp_path}", f"deploy.repository={repository}")
        assert main([*COMMON, "stages=[deploy]", *given, *words]) == status
        if status:
            return []
        (path,) = tmp_path.rglob("*_manifests.yaml")
        assert f"kubectl apply -f {path}" in capsys.readouterr().out
        return list(yaml.safe_load_all(path.read_text()))

    return run


def valid(found: dict[str, Any]) -> None:
    import kubernetes_validate  # takes seconds

    kubernetes_validate.validate(found, "1.30", strict=True)


def pod_of(template: dict[str, Any]) -> dict[str, Any]:
    """Return a template's pod as an object, which has a published schema of its own."""
    return {"apiVersion": "v1", "kind": "Pod", **template} | {
        "metadata": {"name": "x", **template["metadata"]}
    }


def test_one_node_is_a_deployment_and_a_service(render):
    deployment, service = render(*CLAIM, "deploy.cpus_per_task=4", "deploy.mem_gb=32")
    for each in (deployment, service):
        valid(each)
    assert deployment["kind"] == "Deployment"
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == "slipway:0.2.0"
    assert "--model-repository=/data/gpt/model_repo" in container["args"]
    assert container["resources"] == {
        "requests": {"nvidia.com/gpu": 2, "cpu": "4", "memory": "32G"},
        "limits": {"nvidia.com/gpu": 2, "memory": "32G"},
    }
    assert container["startupProbe"]["failureThreshold"] * 10 >= 120  # triton_wait_time_s
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "8002"
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert {each["port"] for each in service["spec"]["ports"]} == {8000, 8001, 8002}


def test_the_endpoint_of_openais_protocol_is_a_port_of_the_service(render):
    deployment, service = render(*CLAIM, "deploy.openai.enabled=true", "deploy.openai.port=0")
    for each in (deployment, service):
        valid(each)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--openai-port=8003" in container["args"]
    assert {"name": "openai", "containerPort": 8003} in container["ports"]
    assert {"name": "openai", "port": 8003, "targetPort": "openai"} in service["spec"]["ports"]


def test_a_pod_asks_for_the_gpus_of_all_instances(render):
    deployment, _ = render(*CLAIM, f"{INSTANCES}=3", "cluster.gpus_per_node=8")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 6


def test_vllm_serves_a_folder_of_the_claim(render):
    deployment, service, monitor = render(
        *CLAIM, "deploy.repository=null", "deploy.engine=vllm", "deploy.vllm.max_num_seqs=8",
        "cluster.kubernetes.token_secret=tokens", "cluster.kubernetes.tls_secret=tls",
        "cluster.kubernetes.pod_monitor=true",
    )  # fmt: skip
    for each in (deployment, service):
        valid(each)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    assert words[:3] == ["vllm", "serve", "/data/gpt/model_repo"]
    assert not any("{" in each for each in words)
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert (given["--host"], given["--port"]) == ("0.0.0.0", "8000")
    assert (given["--tensor-parallel-size"], given["--max-num-seqs"]) == ("2", "8")
    assert given["--ssl-certfile"] == "/run/slipway/tls.crt"
    variables = {each["name"]: each for each in container["env"]}
    assert variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "tokens"
    probes = {container[f"{each}Probe"]["httpGet"]["path"] for each in ("startup", "liveness")}
    assert probes == {"/health"}
    assert [each["port"] for each in service["spec"]["ports"]] == [8000]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "http"


@pytest.mark.parametrize("words", [["deploy.engine=openai"], ["deploy.engine=vllm", *TWO_NODES]])
def test_other_servers_than_vllm_on_one_node_have_no_manifests(render, capsys, words):
    render(*CLAIM, "deploy.repository=null", *words, status=2)
    assert "that engine's publisher" in capsys.readouterr().err.replace("\n", " ")


def test_several_nodes_are_a_group_of_pods(render):
    import jsonschema

    group, service = render(*CLAIM, *TWO_NODES)
    jsonschema.validate(group, LEADER_WORKER_SET)
    valid(service)
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    for each in (leader, worker):
        valid(pod_of(each))
    assert template["size"] == 2
    for each in (leader, worker):
        assert each["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    # Only the first pod answers, and is asked.
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    assert "readinessProbe" not in worker["spec"]["containers"][0]
    assert "export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2" in leader["spec"]["containers"][0]["args"][0]


@pytest.mark.parametrize("engine", ["pytorch", "fastertransformer"])
def test_secrets_are_named_and_never_written(render, engine):
    secrets = ("cluster.kubernetes.token_secret=tokens", "cluster.kubernetes.tls_secret=cert")
    deployment, service = render(
        *CLAIM, *secrets, f"deploy.engine={engine}", "deploy.max_request_mb=7"
    )
    for each in (deployment, service):
        valid(each)
    spec = deployment["spec"]["template"]["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "secrets"]
    assert volume["projected"]["sources"] == [
        {"secret": {"name": "tokens"}},
        {"secret": {"name": "cert"}},
    ]
    (container,) = spec["containers"]
    assert {"--token-file=/run/slipway/tokens", "--max-request-mb=7"} <= {*container["args"]}
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_the_operator_of_prometheus_is_told_what_it_needs(render):
    secrets = ("cluster.kubernetes.token_secret=tokens", "cluster.kubernetes.tls_secret=cert")
    wanted = "cluster.kubernetes.pod_monitor=true"
    group, _, monitor = render(*CLAIM, *TWO_NODES, *secrets, wanted)
    leader = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= leader["metadata"]["labels"].items()
    assert selected["role"] == "leader"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = [each["name"] for each in leader["spec"]["containers"][0]["ports"]]
    assert endpoint["port"] in ports
    assert endpoint["authorization"] == {"credentials": {"name": "tokens", "key": "tokens"}}
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "cert", "key": "ca.crt"}}


def test_conversations_stay_with_one_of_several_servers(render):
    deployment, service = render(
        *CLAIM, "cluster.kubernetes.replicas=3", "export.triton_deployment.interactive=true"
    )
    assert deployment["spec"]["replicas"] == 3
    assert service["spec"]["sessionAffinity"] == "ClientIP"


def test_pods_without_gpus_ask_for_none(render):
    deployment, _ = render(*CLAIM, "cluster.gpus_per_node=null")
    valid(deployment)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"requests": {}, "limits": {}}


def test_what_pods_cannot_do_is_refused_at_once(render, tmp_path, capsys):
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef" * 2)
    tokens.chmod(0o600)
    render(
        "deploy.container=null", "stages=[deploy,evaluate]", f"deploy.token_file={tokens}", status=2
    )
    text = capsys.readouterr().err
    for words in (
        "stages=[deploy, evaluate] needs cluster_type=local, bcm or bcp; set that, or change",
        "needs container or deploy.container",
        "needs cluster.kubernetes.claim or ",
        "name a Secret with its content in cluster.kubernetes.token_secret",
    ):
        assert words in text
    assert not list(tmp_path.rglob("*_manifests.yaml"))


def test_a_server_that_cannot_be_placed_is_refused(render, capsys):
    render(*CLAIM, "deploy.uptime=3-00:00:00", status=2)
    assert "deploy.uptime=3-00:00:00 needs cluster_type=bcm" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/models", "gpt/../.."])
def test_a_folder_outside_the_claim_is_refused(render, folder, capsys):
    render("cluster.kubernetes.claim=models", f"cluster.kubernetes.claim_path={folder}", status=2)
    assert f"cluster.kubernetes.claim_path={folder}: leads out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("deploy_gpt3_5b", "deploy-gpt3-5b"),
        ("5B_model..x", "model-5b-model-x"),
        ("a" * 80, "a" * 52),
    ],
)
def test_names_are_those_that_kubernetes_takes(text, name):
    assert object_name(text) == name
