"""Other engines: the command of vLLM, and what is refused before a server starts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stages.deploy_config import OPENAI, VLLM, DeployConfig, check_deploy
from stages.server_starts import ServerStart


def test_vllm_s_options_are_passed_on_as_it_names_them():
    options = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "lora_modules": ["a=/x", "b=/y"],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "quantization": None,
    }
    command = DeployConfig(
        folder=Path("m"),
        model_name="m",
        engine=VLLM,
        executable="/v/bin/vllm",
        tp_size=2,
        tls_cert=Path("c.pem"),
        tls_key=Path("k.pem"),
        drain_s=44.5,
        vllm=options,
    ).command_line
    assert " ".join(command) == (
        "/v/bin/vllm serve {model} --served-model-name m --tensor-parallel-size 2 "
        "--pipeline-parallel-size 1 --shutdown-timeout 45 --host {host} --port {port} "
        "--ssl-certfile c.pem --ssl-keyfile k.pem --dtype bfloat16 --enforce-eager "
        "--no-enable-prefix-caching "
        '--lora-modules a=/x b=/y --speculative-config {"method": "ngram", '
        '"num_speculative_tokens": 3}'
    )


def config(folder: Path, engine: str = OPENAI) -> DeployConfig:
    (folder / "config.json").write_text("{}")
    own = DeployConfig(
        folder=folder, repository=str(folder), model_name="m", engine=engine, http_port=0
    )
    if engine == VLLM:
        return replace(own, executable=sys.executable)
    return replace(own, command=[sys.executable, "{model}", "{port}"])


def test_a_good_configuration_has_no_problems(tmp_path):
    assert not [*check_deploy(config(tmp_path))]
    assert not [*check_deploy(replace(config(tmp_path, VLLM), serves_here=True))]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"command": ["serve"]}, "deploy.command of deploy.engine=openai"),
        ({"command": ["no-such-program", "{port}"], "serves_here": True}, "is not a program"),
        ({"nodes": 2}, "a model over 2 nodes: deploy.engine=openai"),
        ({"folder": Path("/nowhere")}, "has no config.json"),
    ],
)
def test_what_does_not_fit_is_named(changes, named, tmp_path):
    (problem,) = check_deploy(replace(config(tmp_path), **changes))
    assert named in problem


def test_on_several_nodes_the_first_listens_and_the_others_join_it(tmp_path):
    spread = replace(config(tmp_path, VLLM), nodes=2, tp_size=8, pp_size=2)
    assert not [*check_deploy(spread)]
    start = ServerStart("7", 1, "[fd00::1]:29500")
    first, second = (" ".join(start.fill_command(spread.command_on(rank))) for rank in (0, 1))
    meeting = "--master-addr fd00::1 --master-port 29500"
    assert f"--port {{port}} --nnodes 2 --node-rank 0 {meeting}" in first
    assert second.endswith(f"--shutdown-timeout 30 --nnodes 2 --node-rank 1 {meeting} --headless")
    assert "--port" not in second.split()


def test_options_of_vllm_that_other_keys_decide_are_refused(tmp_path):
    given = {"tensor-parallel-size": 2, "max_num_seqs": 8}
    (problem,) = check_deploy(replace(config(tmp_path, VLLM), vllm=given))
    assert "deploy.vllm.tensor_parallel_size is decided by export.model.tensor_model" in problem


def test_a_folder_from_elsewhere_keeps_its_own_data_type(tmp_path):
    given = config(tmp_path, VLLM)
    assert "--dtype" not in given.command_line
    assert "--dtype" in replace(given, vllm={"dtype": "bfloat16"}).command_line
    assert "--dtype" in replace(given, repository=None).command_line


def test_tokens_and_tls_of_a_given_command_are_its_own(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{'a' * 30}\n{'b' * 30}\n")
    tokens.chmod(0o600)
    (problem,) = check_deploy(replace(config(tmp_path, VLLM), token_file=tokens))
    assert "vLLM takes one" in problem
