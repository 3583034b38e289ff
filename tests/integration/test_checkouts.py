"""NVIDIA's templates and clients as they are, where SLIPWAY_CHECKOUTS names a folder of checkouts.

It holds `fastertransformer_backend` and `pytriton`. Without it this file is not collected;
test_nvidia_repositories.py and test_nemo_service.py try the same fields and requests.
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
from tests.checkouts import copy_template, write_lambada
from tests.conftest import ROOT

pytestmark = pytest.mark.triton

FOLDER = Path(os.environ["SLIPWAY_CHECKOUTS"]) if "SLIPWAY_CHECKOUTS" in os.environ else Path()
CHECKOUT = FOLDER / "fastertransformer_backend"
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
WHOLE = ["After preprocessing", "After fastertransformer", "After postprocessing", "After ensemble"]
_SESSIONS = "interactive_text_generation"
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
    "gptneox": ("gptneox", {}, [(["identity_test.py", "-u", "{http}"], ["[INFO] execution time"])]),
    "bloom": ("bloom", {}, [(["gpt/identity_test.py", "-u", "{http}"], ["[INFO] execution time"])]),
    "t5": (
        "t5",
        {},
        [(["issue_request.py", "requests/sample_request_single_t5.json"], ["output_ids"])],
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
    done = subprocess.run(
        [sys.executable, *given],
        cwd=CHECKOUT / "tools",
        env=os.environ | {"PYTHONPATH": f"{home / 'site'}{os.pathsep}{CHECKOUT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_template_serves_its_clients(case: str, tmp_path: Path) -> None:
    template, changes, clients = CASES[case]
    repository = copy_template(CHECKOUT, template, tmp_path, changes=changes)
    write_lambada(CHECKOUT, tmp_path / "lambada")
    with TritonServer(
        repository,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=tmp_path / "triton.log",
        work_dir=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")},
    ) as server:
        server.start(timeout_s=300)
        for words, expected in clients:
            patches = PATCHES + (CPU if template == "bert" else "")
            printed = _run(words, server=server, home=tmp_path, patches=patches)
            assert [text for text in expected if text not in printed] == [], printed[-3000:]


def test_client_of_pytritons_nemo_example(tmp_path: Path) -> None:
    http, grpc, metrics = pick_free_ports("127.0.0.1", 3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    archive = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"
    options = ["--interface=nemo", "--host=127.0.0.1", "--instances=2", *ports]
    options += [f"--hf-model-name={archive}", f"--output-dir={tmp_path / 'models'}"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "inference.pytriton.server", *options],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        client = FOLDER / "pytriton" / "examples" / "nemo_megatron_gpt_multinode" / "client.py"
        prompts = ["It was the best of times", "My dear"]
        done = subprocess.run(
            [
                sys.executable,
                str(client),
                "--url",
                f"http://127.0.0.1:{http}",
                "--prompts",
                *prompts,
            ],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:] + done.stderr
        assert [prompt for prompt in prompts if f": {prompt}" not in done.stderr] == []
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
