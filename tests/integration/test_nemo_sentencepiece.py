"""A .nemo archive with a SentencePiece tokenizer through the whole pipeline, as one command."""

import json
from pathlib import Path

import pytest
import sentencepiece

from tests.integration.command import FREE_PORTS, finish, start
from tests.tiny import TinyGPT, gpt_tensors, nemo_members, write_tar

pytestmark = pytest.mark.triton

WORDS = "the quick brown fox jumps over the lazy dog and the cook lit the lamp"


def write_checkpoint(folder: Path) -> Path:
    """Write a GPT with TP 2 x PP 2, found by its configuration's `library: sentencepiece`."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([WORDS] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spm"), vocab_size=40,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    model = TinyGPT(positions=48)
    tokenizer = {"library": "sentencepiece", "type": None, "model": "nemo:0123_spm.model"}
    members = nemo_members(gpt_tensors(model), model, tp=2, pp=2, config={"tokenizer": tokenizer})
    members = {name: data for name, data in members.items() if not name.startswith("0123_")}
    members["0123_spm.model"] = (folder / "spm.model").read_bytes()
    # As training leaves it: in the folder that the guide names.
    archive = folder / "checkpoints/megatron_gpt.nemo"
    archive.parent.mkdir()
    return write_tar(archive, members)


def test_archive_with_sentencepiece_is_converted_served_and_breaches_its_bound(
    tmp_path,
):
    archive = write_checkpoint(tmp_path)
    data = tmp_path / "passages.jsonl"
    passages = ["the quick brown fox jumps over the lazy dog", "the cook lit the lamp"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    results = tmp_path / "results"
    command = start(
        "stages=[convert,export,deploy,evaluate]", f"base_results_dir={results}",
        "export.run.model_train_name=spm", f"export.run.training_dir={tmp_path}",
        "export.model.tensor_model_parallel_size=1", "export.model.weight_data_type=fp32",
        "export.triton_deployment.data_type=fp32", "export.triton_deployment.max_batch_size=4",
        f"evaluate.lambada.data_path={data}", "evaluate.latency.shapes=[8+4]",
        "evaluate.latency.concurrencies=[1]", "evaluate.latency.requests=2", *FREE_PORTS,
        "evaluate.gate.lambada_perplexity.max=1.01",
    )  # fmt: skip
    text = finish(command, timeout_s=240)
    assert command.returncode == 3, text
    assert "breaches max 1.01" in text
    assert f"using {archive} in it" in text
    (report_path,) = results.glob("spm/*/results/evaluate/report.json")
    report = json.loads(report_path.read_text())
    values = {each["name"]: each["value"] for each in report["tasks"][0]["metrics"]}
    assert values["lambada_perplexity"] > 1
    assert report["latency"][0]["generated"] > 0
    assert "lambada: " in text
    (shards,) = results.rglob("1-gpu")
    assert (shards / "tokenizer.model").read_bytes() == (tmp_path / "spm.model").read_bytes()
