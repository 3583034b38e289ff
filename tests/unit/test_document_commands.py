"""Commands of the documents are planned as written, up to the start."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from launcher_scripts.main import main
from tests.conftest import ROOT, SAMPLE_MODEL
from tests.documents import commands
from tests.nvidia_repositories import add_nvidia_model
from tests.tiny import nemo_config, write_archive
from tests.tiny_text_gpt2 import write_tiny_gpt2

DOCUMENTS = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("clusters", "docker", "evaluation", "fastertransformer_backend", "migrating",
                     "pytriton", "serving")
    ),
]  # fmt: skip
# Commands that need the reader's files or ask a cluster; each is tested elsewhere.
NOT_HERE = ("action=", "evaluate.server=", "boolq_short", "stages=[evaluate]'\n")


def golden(case: str) -> Callable[[Path, Path], Path]:
    """Return what copies a checkpoint of the reference material, with a tokenizer of its own."""

    def copied(folder: Path, shared: Path) -> Path:
        source = shutil.copytree(shared / "golden" / case / "source", folder / "checkpoint")
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(shared / "sample_model" / name, source)
        return next(source.glob("*.nemo"), source)

    return copied


def keys(folder: Path, _shared: Path) -> Path:
    """Write the certificate, key and token that a server is started with."""
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "chain.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node1"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    (folder / "token").write_text("0123456789abcdef" * 4)
    for name in ("key.pem", "token"):
        (folder / name).chmod(0o600)
    return folder


def repository(folder: Path, _shared: Path) -> Path:
    sizes = {"tensor_para_size": "1", "pipeline_para_size": "1", "data_type": "fp32"}
    add_nvidia_model(folder / "models", "fastertransformer", sizes | {"model_type": "GPT"})
    return folder / "models"


def adapter(folder: Path, _shared: Path) -> Path:
    """Write an adapter of the bundled model."""
    layer = "model.language_model.encoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter."
    factors = {
        f"{layer}linear_in.weight": torch.zeros(4, 256),
        f"{layer}linear_out.weight": torch.zeros(768, 4),
    }
    settings = {"peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 4}}}
    config = nemo_config() | settings | {"tokenizer": None}
    return write_archive(folder / "math.nemo", config, factors)


# Paths of the reader's, by the files that replace them here.
STAND_INS: Mapping[str, Callable[[Path, Path], Path]] = {
    "/models/all_models/gpt": repository,
    "/models/gptj": golden("gptj_hf/tiny"),
    "/models/t5.nemo": golden("t5_nemo/train_tp2_pp1_relative_geglu_nobias"),
    "/models/bert": golden("bert/tiny"),
    "/models/gpt3_5b.nemo": lambda *_: SAMPLE_MODEL,
    "/models/gpt3_5b-huggingface": golden("gptj_hf/tiny"),
    "/adapters/math.nemo": adapter,
    "/data/lambada_test.jsonl": lambda *_: ROOT / "examples/passages.jsonl",
    "/keys": keys,
}


def shown() -> list[str]:
    texts = (path.read_text() for path in DOCUMENTS)
    return [line for text in texts for line in commands(text) if "python main.py" in line]


def planned() -> list[str]:
    return [line for line in shown() if not any(words in f"{line}\n" for words in NOT_HERE)]


def words_of(line: str, folder: Path, shared: Path) -> list[str]:
    """Return the overrides of a command, with a model of ours where the reader's own is meant."""
    named = [path for path in STAND_INS if path in line]
    words = shlex.split(line.replace("$PWD", str(folder)).replace(" ... ", " "), comments=True)
    for path in named:
        stand_in = str(STAND_INS[path](folder, shared))
        words = [word.replace(path, stand_in) for word in words]
    words = words[next(i for i, word in enumerate(words) if word.endswith("main.py")) + 1 :]
    words = [re.sub(r"^(base_results_dir|data_dir)=.*", rf"\1={folder}/r", word) for word in words]
    words = [word for word in words if not word.startswith("launcher_scripts_path=")]
    if not named and not {"export=gpt3/sample", "dry_run=true"} & {*words}:
        source = write_tiny_gpt2(folder / "source", positions=1024)
        words += [
            f"export.model.checkpoint_path={source}",
            "export.model.tensor_model_parallel_size=1",
            "export.triton_deployment.max_batch_size=8",
        ]
    for name in ("slipway.sqsh", "slipway-ft.sqsh"):
        (folder / name).touch()
    words = [word.replace("/images/", f"{folder}/") for word in words]
    if not any(word.startswith("base_results_dir=") for word in words):
        words.append(f"base_results_dir={folder}/r")
    return words


@pytest.mark.parametrize("line", planned())
def test_command_is_planned_as_written(line, tmp_path, shared, capsys):
    status = main([*words_of(line, tmp_path, shared), "dry_run=true"])
    seen = capsys.readouterr()
    assert status == 0, seen.err
    assert list(tmp_path.rglob("*_submission.sh")) or list(tmp_path.rglob("*_manifests.yaml"))


@pytest.mark.parametrize("line", [each for each in shown() if "action=" in each])
def test_action_has_its_keys(line, tmp_path, shared):
    assert main([*words_of(line, tmp_path, shared), "--cfg", "job"]) == 0


def test_most_commands_are_looked_at():
    assert len(planned()) >= 25
