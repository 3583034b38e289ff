"""Servers that are not ours as `deploy.engine`, asked by the evaluation.

`transformers serve` is always there. vLLM needs an environment of its own: SLIPWAY_VLLM names the
`vllm` command of one, such as that of the CPU build with the torch of requirements/torch.txt.
"""

import http.client
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert
from tests.conftest import ROOT
from tests.integration.command import endpoint_of, finish, start
from tests.openai_servers import write_served_model, write_tokenizer
from tests.tiny_megatron_core import CORE, write_core
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.conversion.test_mixtures import write_nemo_2
from tests.waiting import until

VLLM = os.environ.get("SLIPWAY_VLLM", "")
TRANSFORMERS = Path(sys.executable).with_name("transformers")


def test_transformers_serves_and_is_evaluated(tmp_path):
    model = write_served_model(tmp_path / "model")
    command = [str(TRANSFORMERS), "serve", "'{model}'", "--host", "'{host}'", "--port", "'{port}'"]
    words = ",".join((*command, "--device", "cpu"))
    run = start(
        "export=gpt3/sample",
        "stages=[deploy,evaluate]",
        f"base_results_dir={tmp_path}/results",
        "deploy.engine=openai",
        f"deploy.command=[{words}]",
        f"deploy.repository={model}",
        "deploy.http_port=0",
        "evaluate.tasks=[lambada]",
        "evaluate.gate={}",
        "evaluate.baseline=none",
        "evaluate.limit=3",
        "evaluate.latency.shapes=[8+4]",
        "evaluate.latency.requests=2",
        f"evaluate.lambada.data_path={ROOT}/examples/passages.jsonl",
        environment={"HF_HUB_OFFLINE": "1"},
    )
    text = finish(run)
    assert run.returncode == 0, text
    assert "serving OpenAI on http://127.0.0.1:" in text
    (path,) = (tmp_path / "results").glob("**/evaluate/report.json")
    report = json.loads(path.read_text())
    (task,) = report["tasks"]
    assert [metric["name"] for metric in task["metrics"]] == ["lambada_last_word"]
    assert "lambada_perplexity is left out: the server returns no log probabilities" in task["note"]
    assert "lambada_last_token is left out: the server takes no token ids" in task["note"]
    assert {point["streamed"] for point in report["latency"]} == {True}


needs_vllm = pytest.mark.skipif(not VLLM, reason="SLIPWAY_VLLM names no vllm command")
VLLM_WORDS = (
    "deploy.engine=vllm",
    f"deploy.executable={VLLM}",
    "deploy.http_port=0",
    "deploy.vllm.enforce_eager=true",
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# vLLM's attention on the CPU has heads of 32 and more.
SIZES = {
    "hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


def nemo_2_of(original: Path, folder: Path) -> Path:
    sizes = {"hidden_size": 128, "kv_channels": 32, "seq_length": 64, "moe_ffn_hidden_size": 64}
    source = write_nemo_2(folder / "nemo2", original, sizes)
    write_tokenizer(source / "context" / "nemo_tokenizer")
    return source


def shards_of(original: Path, folder: Path) -> Path:
    return convert(ConversionRequest(original, folder, 2, "fp32")).ft_dir


@needs_vllm
@pytest.mark.parametrize(
    ("name", "kind", "source_of"),
    [("qwen3-moe", "mixture", nemo_2_of), ("gemma3", "llama", shards_of)],
)
def test_vllm_generates_what_transformers_does(name, kind, source_of, tmp_path):
    sizes = SIZES | {"vocab_size": write_tokenizer(tmp_path / "original")}
    if kind == "mixture":
        sizes |= {"moe_intermediate_size": 64}
    original = write_model(name, tmp_path / "original", **sizes)
    prompt = list(range(3, 23))
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, 20:]
    results = tmp_path / "results"
    run = start(
        "stages=[convert,deploy]",
        f"base_results_dir={results}",
        f"export.run.results_dir={results}",
        "export.run.model_train_name=tiny",
        f"export.run.model_type={kind}",
        f"export.model.checkpoint_path={source_of(original, tmp_path)}",
        "export.model.tensor_model_parallel_size=1",
        "export.model.weight_data_type=fp32",
        "export.triton_deployment.data_type=fp32",
        "convert.format=huggingface",
        *VLLM_WORDS,
        environment=OFFLINE,
    )
    try:
        found = endpoint_of(results / "deploy" / "endpoint.json", run, timeout_s=400)
        connection = http.client.HTTPConnection("127.0.0.1", found["http"], timeout=60)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        words = json.dumps(body | {"return_token_ids": True})
        connection.request("POST", "/v1/completions", words, {"content-type": "application/json"})
        (choice,) = json.load(connection.getresponse())["choices"]
    finally:
        run.send_signal(signal.SIGINT)
        text = finish(run)
    assert run.returncode == 0, text
    assert choice["token_ids"] == answer.tolist()


@needs_vllm
def test_vllm_answers_as_the_model_of_a_nemo_archive(tmp_path):
    run = start(
        "export=gpt3/sample",
        "stages=[convert,deploy,evaluate]",
        f"base_results_dir={tmp_path}",
        "convert.format=huggingface",
        "deploy.vllm.max_model_len=512",
        "export.model.tensor_model_parallel_size=1",
        "evaluate.baseline=compare",
        f"evaluate.baseline_path={ROOT}/examples/gpt_books_5m/passages_reference.json",
        *(f"evaluate.gate.lambada_{each}='no change'" for each in ("last_word", "last_token")),
        "evaluate.gate.lambada_perplexity='no change of more than 0.1 %'",
        *VLLM_WORDS,
        environment=OFFLINE,
    )
    text = finish(run, timeout_s=600)
    assert run.returncode == 0, text


def llama_and_adapter(folder: Path) -> tuple[Path, Path]:
    """Write a NeMo archive of a Llama, and one of an adapter of it."""
    torch.manual_seed(3)
    layers = {
        "self_attention.linear_qkv": ("self_attention.adapter_layer.lora_kqv_adapter", 256, 128),
        "mlp.linear_fc1": ("mlp.adapter_layer.lora_hto4h_adapter", 192, 128),
        "mlp.linear_fc2": ("mlp.adapter_layer.lora_4htoh_adapter", 128, 96),
    }
    vocab_size = write_tokenizer(folder)
    state = {
        "model.embedding.word_embeddings.weight": torch.randn(vocab_size, 128),
        "model.output_layer.weight": torch.randn(vocab_size, 128),
        "model.decoder.final_layernorm.weight": torch.ones(128),
    }
    factors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        prefix = f"model.decoder.layers.{layer}."
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            state[f"{prefix}{name}.weight"] = torch.ones(128)
        state[f"{prefix}self_attention.linear_proj.weight"] = torch.randn(128, 128) / 11
        for name, (adapter, rows, columns) in layers.items():
            state[f"{prefix}{name}.weight"] = torch.randn(rows, columns) / 11
            factors[f"{prefix}{adapter}.linear_in.weight"] = torch.randn(24, columns) / 11
            factors[f"{prefix}{adapter}.linear_out.weight"] = torch.randn(rows, 24) / 11
    sizes = {"hidden_size": 128, "ffn_hidden_size": 96, "kv_channels": 32}
    lora = {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 24, "alpha": 48}}
    settings = CORE | sizes | {"max_position_embeddings": 512}
    return (
        write_core(folder / "base.nemo", state, **settings),
        write_core(folder / "lora.nemo", factors, **settings, peft=lora),
    )


@needs_vllm
@pytest.mark.timeout(900)
def test_vllm_serves_an_adapter_by_name(tmp_path):
    source, adapter = llama_and_adapter(tmp_path)
    folders = {}
    for name, lora in (("tiny", (adapter,)), ("tiny-base", ())):
        request = ConversionRequest(
            source, tmp_path / name, 1, "fp32", output_format="huggingface", lora_checkpoints=lora,
            given=(("start_id", "0"), ("end_id", "0")), allow=("tokenizer",),
        )  # fmt: skip
        folders[name] = convert(request).ft_dir
    base = folders["tiny-base"]
    write_tokenizer(base)
    prompt = list(range(3, 23))
    answers = {}
    for name, folder in folders.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        answers[name] = out[0, 20:].tolist()
    assert len({str(answer) for answer in answers.values()}) == 2
    results = tmp_path / "results"
    run = start(
        "stages=[convert,deploy,evaluate]",
        f"base_results_dir={results}",
        f"export.run.results_dir={results}",
        "export.run.model_train_name=tiny",
        f"export.model.checkpoint_path={source}",
        "export.model.tensor_model_parallel_size=1",
        "export.model.weight_data_type=fp32",
        "convert.format=peft",
        "convert.given={start_id:0,end_id:0}",
        f"convert.lora_checkpoints=[{adapter}]",
        f"deploy.repository={base}",
        "deploy.keep=true",
        "+deploy.vllm.dtype=float32",
        # With an adapter's place at the head, vLLM 0.32 ends when asked for a prompt's.
        "+deploy.vllm.lora_target_modules=[q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj]",
        "evaluate.tasks=[lambada]",
        "evaluate.gate={}",
        "evaluate.baseline=none",
        "evaluate.limit=3",
        "evaluate.latency.shapes=[8+4]",
        "evaluate.latency.requests=2",
        f"evaluate.lambada.data_path={ROOT}/examples/passages.jsonl",
        *VLLM_WORDS,
        environment=OFFLINE,
    )
    try:
        found = endpoint_of(results / "deploy" / "endpoint.json", run, timeout_s=400)
        for name, answer in answers.items():
            connection = http.client.HTTPConnection("127.0.0.1", found["http"], timeout=60)
            body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            words = json.dumps(body | {"return_token_ids": True})
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", words, headers)
            (choice,) = json.load(connection.getresponse())["choices"]
            assert choice["token_ids"] == answer
        until(lambda: any(results.glob("**/evaluate/report.json")), "the report", limit_s=300)
    finally:
        run.send_signal(signal.SIGINT)
        text = finish(run)
    assert run.returncode in (0, 130), text  # interrupted, maybe before it has seen the end
    (path,) = results.glob("**/evaluate/report.json")
    (task,) = json.loads(path.read_text())["tasks"]
    assert "lambada_token_perplexity" in {metric["name"] for metric in task["metrics"]}


@needs_vllm
@pytest.mark.timeout(1200)
def test_fp8_is_judged_against_its_source(tmp_path):
    sizes = SIZES | {"vocab_size": write_tokenizer(tmp_path / "model")}
    source = write_model("llama", tmp_path / "model", **(sizes | {"max_position_embeddings": 512}))
    run = start(
        "action=upgrade",
        "stages=[convert,deploy,evaluate]",
        f"base_results_dir={tmp_path}/results",
        "export.run.model_train_name=tiny",
        "export.run.model_type=llama",
        f"export.model.checkpoint_path={source}",
        "export.model.tensor_model_parallel_size=1",
        "export.model.weight_data_type=bf16",
        "export.triton_deployment.data_type=bf16",
        "convert.format=huggingface",
        "upgrade.rows={source:{},fp8:{convert.fp8:channel}}",
        f"upgrade.output_dir={tmp_path}/upgrade",
        "evaluate.protocol=openai",
        "evaluate.tasks=[lambada]",
        "evaluate.limit=8",
        "evaluate.latency.shapes=[8+4]",
        "evaluate.latency.requests=2",
        f"evaluate.lambada.data_path={ROOT}/examples/passages.jsonl",
        *VLLM_WORDS,
        environment=OFFLINE,
    )
    text = finish(run, timeout_s=1200)
    verdict = json.loads((tmp_path / "upgrade" / "upgrade.json").read_text())
    # A random model's eight passages may breach a bound, or not suffice for one.
    assert verdict["exit_status"] == run.returncode in (0, 3, 5), text
    folder = next((tmp_path / "upgrade" / "fp8").glob("**/huggingface/config.json"))
    assert json.loads(folder.read_text())["quantization_config"]["ignore"]
