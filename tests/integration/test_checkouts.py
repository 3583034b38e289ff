"""NVIDIA's templates and clients as they are, where SLIPWAY_CHECKOUTS names a folder of checkouts.

It holds `fastertransformer_backend` and `pytriton`. Clients that import NeMo are tried where it
also holds an environment `nemo`: nemo_toolkit 2.0.0 as benchmarks/peers/nemo_logits.py names it,
with tritonclient, nvidia-pytriton, sacrebleu, rouge-score, datasets below 3. Without the variable
this file is not collected; test_nvidia_repositories.py and test_nemo_service.py try the same fields
and requests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference.ports import pick_free_ports
from inference.server.server import TritonServer
from tests.checkouts import copy_template, write_lambada, write_utilities
from tests.conftest import ROOT

pytestmark = pytest.mark.triton

FOLDER = Path(os.environ["SLIPWAY_CHECKOUTS"]) if "SLIPWAY_CHECKOUTS" in os.environ else Path()
CHECKOUT = FOLDER / "fastertransformer_backend"
HAS_NEMO = (FOLDER / "nemo").exists()
# Names that numpy has removed since, and CUDA, which one client takes for granted.
PATCHES = """
import numpy as np
np.bool, np.int, np.float = bool, int, float
"""
CPU = """
import torch
if not torch.cuda.is_available():
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
"""
# What these clients take for granted, too: ports 8000 and 8001, values of enumerations that NeMo
# removed, and a metric and articles that datasets would download.
NEMO = """
import enum, os, sys
import tritonclient.grpc, tritonclient.http
for module in (tritonclient.grpc, tritonclient.http):
    def begin(self, _, *args, init=module.InferenceServerClient.__init__,
              url=os.environ[module.__name__], **options):
        init(self, url, *args, **options)
    module.InferenceServerClient.__init__ = begin
if "squad" in os.environ["CLIENT"]:
    import nemo.collections.nlp.modules.common as common
    class VirtualPromptStyle(enum.Enum):
        P_TUNING, PROMPT_TUNING, INFERENCE = "p-tuning", "prompt-tuning", "inference"
    class VirtualPromptSource(enum.Enum):
        PROMPT_TABLE, PROMPT_ENCODER = "prompt_table", "prompt_encoder"
    common.VirtualPromptStyle, common.VirtualPromptSource = VirtualPromptStyle, VirtualPromptSource
if "summarization" in os.environ["CLIENT"]:
    import datasets
    from rouge_score import rouge_scorer, scoring
    class Rouge:
        def __init__(self, _):
            self.found = scoring.BootstrapAggregator()
        def add_batch(self, predictions, references):
            scorer = rouge_scorer.RougeScorer(["rouge1", "rougeLsum"])
            for text, reference in zip(predictions, references):
                self.found.add_scores(scorer.score(reference, text))
        def compute(self):
            return self.found.aggregate()
    class Articles:
        def __getitem__(self, _):
            return {"article": "A man was late. " * 8, "highlights": "He was late."}
    datasets.load_metric, datasets.load_dataset = Rouge, lambda *_, **__: {"test": Articles()}
"""
PROMPTS = ["It was the best of times", "My dear"]
QUERIES = """
import sys
from nemo.deploy.nlp.query_llm import NemoQueryLLM, NemoQueryLLMPyTorch
url, *prompts = sys.argv[1:]
given = {"prompts": prompts, "top_k": 1, "top_p": 0.0, "temperature": 1.0}
texts = NemoQueryLLM(url, "GPT").query_llm(max_output_len=8, random_seed=1, **given)
found = NemoQueryLLMPyTorch(url, "GPT").query_llm(max_length=8, compute_logprob=True, **given)
assert [text.decode() for text in found["sentences"][:, 0]] == texts[:, 0].tolist()
assert (found["logprob"][:, 0, 0] < 0).all()
print(*(f": {text}" for text in texts[:, 0]), sep="\\n")
"""
WHOLE = ["After preprocessing", "After fastertransformer", "After postprocessing", "After ensemble"]
_SESSIONS = "interactive_text_generation"
_SQUAD = ["-gpt_model_path", "{home}/gpt", "-virtual_prompt_model_path", "{home}/virtual"]
_EN = str(CHECKOUT / "tools" / "t5_utils" / "test.en")
_BOOLQ = ["t5_utils/boolq_test.py", "-data_path", "{home}/boolq.jsonl", "-batch", "2"]
_BOOLQ += ["--ckpt_path", "{home}/c-model/tuned/1-gpu"]
# Template, changes to it, and its clients: words of the command, and what it has to print.
Client = tuple[list[str], list[str]]
CASES: dict[str, tuple[str, dict[str, str], list[Client]]] = {
    "gpt": (
        "gpt",
        {},
        [
            (["gpt/identity_test.py", "-u", "{http}"], ["[INFO] execution time"]),
            (["gpt/identity_test.py", "-i", "grpc", "-u", "{grpc}"], ["[INFO] execution time"]),
            (["gpt/end_to_end_test.py", "-u", "{http}", "--return_log_probs"], WHOLE),
            (["issue_request.py", "requests/sample_request.json"], ["output_ids"]),
            (["issue_request.py", "requests/sample_request_runtime_top_k.json"], ["output_ids"]),
            (["issue_request.py", "requests/sample_request_single.json"], ["output_ids"]),
            (["issue_request.py", "requests/sample_request_ensemble.json"], ["OUTPUT_0"]),
            (
                [
                    *("gpt/evaluate_lambada.py", "-u", "{http}", "-d", "{home}/lambada"),
                    *("-o", "{home}/lambada.csv"),
                ],
                ["[INFO] last token accuracy", "(total token num: 3)"],
            ),
        ],
    ),
    "gpt, with NeMo": (
        "gpt",
        {},
        [
            (
                [
                    *(f"gpt/gpt_prompt_learning_squad_task_{kind}.py", *data, *_SQUAD, *options),
                ],
                printed,
            )
            for kind, data, printed in (
                ("eval", ["-data_path", "{home}/squad.jsonl"], ["SQuAD Total: 1"]),
                ("identity_test", [], ["get request"]),
            )
            for options in ([], ["-use_request_prompt_embedding"])
        ],
    ),
    "gpt, streaming": (
        "gpt",
        {"decoupled: False": "decoupled: True"},
        [(["issue_request.py", "requests/sample_request_stream.json"], ["Partial result"])],
    ),
    "interactive": (
        "gpt-interactive-text-generation",
        {},
        [
            (
                [f"{_SESSIONS}/identity_test.py", "-u", "{http}", "-session_id", "5"],
                ["[INFO] execution time"],
            ),
            (
                [f"{_SESSIONS}/end_to_end_test.py", "-u", "{http}", "-session_id", "6"],
                WHOLE,
            ),
        ],
    ),
    "gptj": (
        "gptj",
        {},
        [
            (["identity_test.py", "-u", "{http}"], ["[INFO] execution time"]),
            (["end_to_end_test.py", "-u", "{http}"], WHOLE),
        ],
    ),
    "gptneox": (
        "gptneox",
        {},
        [
            (["identity_test.py", "-u", "{http}"], ["[INFO] execution time"]),
            (["gpt/gptneox_jp_test.py", "-u", "{http}"], WHOLE),
        ],
    ),
    "bloom": ("bloom", {}, [(["gpt/identity_test.py", "-u", "{http}"], ["[INFO] execution time"])]),
    "t5": (
        "t5",
        {},
        [(["issue_request.py", "requests/sample_request_single_t5.json"], ["output_ids"])],
    ),
    "t5, with NeMo": (
        "t5",
        {},
        [
            (
                [
                    *("t5_utils/t5_end_to_end_test.py", "-max_ite", "2", "-batch", "2"),
                    *("--source", _EN, "--target", _EN.replace(".en", ".de")),
                ],
                ["ft_triton translates 2 batches"],
            ),
            (
                [
                    *("t5_utils/summarization.py", "--test_ft", "--test_hf", "--max_ite", "2"),
                    *("--ft_model_location", "{home}/c-model/tuned/1-gpu", "--max_seq_len", "12"),
                    *("--hf_model_location", "{home}/c-model/source", "--cache_path", "{home}"),
                ],
                ["Faster Transformers (total latency", "Hugging Face (total latency", "rougeLsum"],
            ),
            (["t5_utils/t5_mnli_task.py", "-data_path", "{home}/mnli.tsv"], ["[accuracy]"]),
            (
                [
                    *("t5_utils/t5_xnli_task.py", "-data_path", "{home}/xnli.tsv"),
                    *("-tokenizer_model", "{home}/hub/models--t5-small/snapshots/0/spiece.model"),
                ],
                ["[total_acc]", "[de_acc]"],
            ),
            (_BOOLQ, ["[accuracy]"]),
            ([*_BOOLQ, "-use_request_prompt_embedding"], ["[accuracy]"]),
        ],
    ),
    "t5, streaming": (
        "t5",
        {"max_batch_size": "model_transaction_policy { decoupled: True }\nmax_batch_size"},
        [(["issue_request.py", "requests/sample_request_stream_t5.json"], ["Partial result"])],
    ),
    "t5-encoder": (
        "t5-encoder",
        {},
        [
            (
                ["issue_request.py", "requests/sample_request_single_t5_encoder.json"],
                ["output_hidden_state", "output_attentions"],
            ),
            (["issue_request.py", "requests/sample_request_tokenizer.json"], ["input_ids"]),
        ],
    ),
    "bert": (
        "bert",
        {},
        [
            (
                [
                    *("bert/identity_test.py", "-u", "{http}", "--inference_data_type", "fp16"),
                    *("--hf_ckpt_path", "{home}/c-model/source", "--max_diff_threshold", "0.05"),
                ],
                ["abs max diff"],
            )
        ],
    ),
}


def _run(words: list[str], *, server: TritonServer, home: Path, patches: str) -> str:
    """Run a client of the checkout, in its folder `tools`; return what it printed."""
    (home / "site").mkdir(exist_ok=True)
    (home / "site" / "sitecustomize.py").write_text(patches)
    places = {"http": server.http_url, "grpc": server.grpc_url, "home": str(home)}
    given = [word.format(**places) for word in words]
    if words[0] == "issue_request.py":
        url = server.grpc_url if "stream" in words[1] else server.http_url
        given += ["--params", json.dumps({"config": {"url": url}})]
    python, folder = sys.executable, CHECKOUT / "tools"
    if NEMO in patches:
        # They leave files where they run.
        python, folder, given[0] = str(FOLDER / "nemo/bin/python"), home, str(folder / words[0])
    own = {"tritonclient.http": server.http_url, "tritonclient.grpc": server.grpc_url}
    own |= {"CLIENT": words[0], "TORCH_HOME": str(home / "torch"), **_hub(home)}
    done = subprocess.run(
        [python, *given],
        cwd=folder,
        env=os.environ | own | {"PYTHONPATH": f"{home / 'site'}{os.pathsep}{CHECKOUT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _hub(home: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home / "hub")}


@pytest.mark.parametrize("case", [each for each in CASES if HAS_NEMO or "NeMo" not in each])
@pytest.mark.timeout(1800)  # NeMo takes a minute to import
def test_template_serves_its_clients(case: str, tmp_path: Path) -> None:
    template, changes, clients = CASES[case]
    repository = copy_template(CHECKOUT, template, tmp_path, changes=changes)
    write_lambada(CHECKOUT, tmp_path / "lambada")
    is_nemo = "NeMo" in case
    if is_nemo:
        write_utilities(CHECKOUT, tmp_path)
    with TritonServer(
        repository,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=tmp_path / "triton.log",
        work_dir=tmp_path,
        env=_hub(tmp_path),
    ) as server:
        server.start(timeout_s=300)
        for words, expected in clients:
            patches = PATCHES + CPU * (is_nemo or template == "bert") + NEMO * is_nemo
            printed = _run(words, server=server, home=tmp_path, patches=patches)
            assert [text for text in expected if text not in printed] == [], printed[-3000:]
            assert "Error with datapoint" not in printed, printed[-3000:]


@pytest.mark.parametrize("interface", ["nemo", "nemo-deploy"] if HAS_NEMO else ["nemo"])
def test_nemos_clients_of_pytriton(interface: str, tmp_path: Path) -> None:
    http, grpc, metrics = pick_free_ports("127.0.0.1", 3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    archive = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"
    options = [f"--interface={interface}", "--host=127.0.0.1", "--instances=2", *ports]
    options += [f"--hf-model-name={archive}", f"--output-dir={tmp_path / 'models'}"]
    example = FOLDER / "pytriton" / "examples" / "nemo_megatron_gpt_multinode" / "client.py"
    url = f"http://127.0.0.1:{http}"
    client = [sys.executable, str(example), "--url", url, "--prompts", *PROMPTS]
    if interface == "nemo-deploy":
        options.append("--model-name=GPT")
        client = [str(FOLDER / "nemo/bin/python"), "-c", QUERIES, url, *PROMPTS]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "inference.pytriton.server", *options],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        done = subprocess.run(client, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:] + done.stderr
        shown = done.stdout + done.stderr
        assert [prompt for prompt in PROMPTS if f": {prompt}" not in shown] == []
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
