"""Served log probabilities against the source's and against those of a training step."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inference.certify.__main__ import main
from inference.certify.served import read_training_rows
from tests.tiny_transformers import write_model

IDS = [[5, 9, 2, 40, 7, 11], [3, 3, 8, 21]]


class Server(ThreadingHTTPServer):
    """A server of OpenAI's completions: transformers, with an error of its own for some rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.error_in_batches = 0.0
        self.gives_log_probs = True
        self.shift = 0  # of the ids that it says it has read

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def log_probs(self, ids: list[int]) -> list[float | None]:
        with torch.no_grad():
            logits = self.network(torch.tensor([ids])).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return [None, *found.tolist()]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self, table: Any) -> None:
        data = json.dumps(table).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows = body["prompt"]
        choices = []
        for number, ids in enumerate(rows):
            scores = self.server.log_probs(ids)
            if len(rows) > 1 and number == 1 and scores[3] is not None:
                scores[3] -= self.server.error_in_batches
            own = {"token_logprobs": [*scores, -1.0]} if self.server.gives_log_probs else None
            choice = {"index": number, "text": "", "finish_reason": "length", "logprobs": own}
            if body.get("return_token_ids"):
                choice["prompt_token_ids"] = [each + self.server.shift for each in ids]
            choices.append(choice)
        self.answer({"choices": choices, "usage": {"prompt_tokens": sum(map(len, rows))}})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with Server(model) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def parts(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / "certificate.json").read_text())
    return {each["name"]: each for each in table["parts"]}


def test_endpoint_of_the_same_model_passes(model, server, tmp_path):
    words = [str(model), str(model), "--output", str(tmp_path), "--endpoint", server.url]
    assert main([*words, "--log-prob-tolerance", "1e-4"]) == 0
    served = parts(tmp_path)["served"]
    assert [row["batch_size"] for row in served["rows"]] == [1, 8]
    assert all(row["largest"] < 1e-4 and row["tokens"] == 156 for row in served["rows"])


def test_rows_are_as_many_and_as_long_as_asked(model, server, tmp_path):
    words = [str(model), "--endpoint", server.url, "--output", str(tmp_path), "--samples", "3"]
    assert main([*words, "--input-len", "9", "--min-input-len", "9", "--batch-sizes", "2"]) == 0
    assert [row["tokens"] for row in parts(tmp_path)["served"]["rows"]] == [3 * 8]


def test_error_of_batches_is_named_with_its_row_and_token(model, server, tmp_path):
    server.error_in_batches = 0.5
    words = [str(model), str(model), "--output", str(tmp_path), "--endpoint", server.url]
    assert main(words) == 1
    (found,) = parts(tmp_path)["served"]["findings"]
    assert found["where"].startswith("batch size 8, row 1, token 3 ")


def test_endpoint_that_reads_other_ids_is_not_called_equal(model, server, tmp_path):
    server.shift = 1
    words = [str(model), str(model), "--output", str(tmp_path), "--endpoint", server.url]
    assert main(words) == 3
    (found,) = parts(tmp_path)["served"]["findings"]
    assert "has read [16, " in found["detail"]


def test_endpoint_without_log_probabilities_is_not_called_equal(model, server, tmp_path):
    server.gives_log_probs = False
    words = [str(model), str(model), "--output", str(tmp_path), "--endpoint", server.url]
    assert main(words) == 3
    assert parts(tmp_path)["served"]["status"] == "not computed"


def training_file(form: str, server: Server, folder: Path, *, error: float = 0.0) -> Path:
    """Write what a training step computed of IDS, in a trainer's form; row 0 has an error."""
    rows = []
    for number, ids in enumerate(IDS):
        scores = [0.0, *(score for score in server.log_probs(ids) if score is not None)]
        if number == 0:
            scores[4] += error
        rows.append((ids, scores))
    if form.startswith("slime"):
        samples: list[dict[str, Any]] = [
            {"tokens": ids, "response_length": len(ids) - 2, "rollout_log_probs": scores[2:],
             "loss_mask": [1] * (len(ids) - 2)}
            for ids, scores in rows
        ]  # fmt: skip
        if form == "slime's training":
            samples = [
                {"tokens": torch.tensor(each["tokens"]), "loss_masks": torch.ones(2 + 2 * (not n)),
                 "log_probs": torch.tensor(each["rollout_log_probs"]),
                 "rollout_log_probs": torch.zeros(len(each["rollout_log_probs"]))}
                for n, each in enumerate(samples)
            ]  # fmt: skip
        path = folder / "rollout.pt"
        torch.save({"rollout_id": 0, "samples": samples}, path)
        return path
    if form == "verl's queue":  # nested tensors
        columns: dict[str, list[Any]] = {
            "prompts": [ids[:2] for ids, _ in rows],
            "responses": [ids[2:] for ids, _ in rows],
            "response_mask": [[1] * (len(ids) - 2) for ids, _ in rows],
            "old_log_probs": [scores[2:] for _, scores in rows],
        }
        path = folder / "queue.pt"
        nested = {
            name: torch.nested.as_nested_tensor(
                [torch.tensor(row) for row in rows], layout=torch.jagged
            )
            for name, rows in columns.items()
        }
        torch.save(nested, path)
        return path
    if form == "verl's batch":  # prompts are padded on the left, answers on the right
        batch = {
            "prompts": [[0, *ids[:2]] for ids, _ in rows],
            "responses": [[*ids[2:], 0, 0][:4] for ids, _ in rows],
            "old_log_probs": [[*scores[2:], 0.0, 0.0][:4] for _, scores in rows],
            "response_mask": [[1] * 4, [1, 1, 0, 0]],
            "attention_mask": [[0, *[1] * 6], [0, *[1] * 4, 0, 0]],
        }
        path = folder / "batch.pt"
        torch.save({name: torch.tensor(each) for name, each in batch.items()}, path)
        return path
    lines = {
        "plain": lambda ids, scores: {"token_ids": ids, "logprobs": scores},
        "NeMo-RL": lambda ids, scores: {
            "content": ["x"], "token_ids": [[*ids, 0, 0]], "prev_logprobs": [[*scores, 0, 0]],
            "generation_logprobs": [[0] * (len(ids) + 2)], "input_lengths": [len(ids)],
            "token_loss_mask": [[0, 0, *[1] * (len(ids) - 2), 0, 0]], "idx": 0,
        },
        "NeMo-RL on policy": lambda ids, scores: {
            "token_ids": [ids], "prev_logprobs": [[0.0] * len(ids)],
            "generation_logprobs": [[0.0, 0.0, *scores[2:]]], "input_lengths": [len(ids)],
            "token_loss_mask": [[0, 0, *[1] * (len(ids) - 2)]],
        },
        "OpenRLHF": lambda ids, scores: {  # without the first token
            "sequences": [[0, *ids, 0]], "attention_mask": [[0, *[1] * len(ids), 0]],
            "action_log_probs": [[0.0, *scores[1:], 0.0]],
            "action_mask": [[0, 0, *[1] * (len(ids) - 2), 0]],
        },
        "TRL": lambda ids, scores: {
            "prompt_ids": [[0, *ids[:2]]], "prompt_mask": [[0, 1, 1]],
            "completion_ids": [[*ids[2:], 0]], "completion_mask": [[1] * (len(ids) - 2) + [0]],
            "old_per_token_logps": None, "sampling_per_token_logps": [[*scores[2:], 0.0]],
        },
        "verl": lambda ids, scores: {
            "prompts": ids[:2], "responses": ids[2:], "old_log_probs": scores[2:],
            "response_mask": [1] * (len(ids) - 2),
        },
    }  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(lines[form](*row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("form", "tokens"),
    [("plain", 8), ("NeMo-RL", 6), ("NeMo-RL on policy", 6), ("OpenRLHF", 6), ("TRL", 6),
     ("verl", 6), ("verl's batch", 6),
     ("verl's queue", 6), ("slime", 6), ("slime's training", 6)],
)  # fmt: skip
def test_training_step_is_compared_with_the_server(form, tokens, server, tmp_path):
    path = training_file(form, server, tmp_path)
    words = ["--training", str(path), "--endpoint", server.url, "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert [row["tokens"] for row in parts(tmp_path / "out")["training"]["rows"]] == [tokens] * 2
    path = training_file(form, server, tmp_path, error=0.3)
    assert main(["--training", str(path), *words[2:]]) == 1
    (first, _) = parts(tmp_path / "out")["training"]["findings"]
    assert first["where"].startswith("batch size 1, row 0, token 4 ")


def test_rows_without_log_probabilities_are_counted(server, tmp_path):
    path = training_file("plain", server, tmp_path)
    (first, *others) = path.read_text().splitlines()
    aborted = json.dumps({**json.loads(first), "logprobs": None})
    path.write_text("\n".join([aborted, json.dumps({"token_ids": [], "logprobs": []}), *others]))
    words = ["--training", str(path), "--endpoint", server.url, "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert "(2 more have none)" in parts(tmp_path / "out")["training"]["compared"]


def test_a_log_probability_that_is_no_number_differs(server, tmp_path):
    path = training_file("plain", server, tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["logprobs"][-1] = float("nan")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--training", str(path), "--endpoint", server.url, "--output", str(tmp_path / "out")]
    assert main(words) == 1
    (first, _) = parts(tmp_path / "out")["training"]["findings"]
    assert "row 1" in first["where"]
    assert "nan expected" in first["where"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response_length": 5, "logprobs": [-1.0] * 3}, "3 log probabilities for the 5 tokens"),
        ({"logprobs": [-1.0] * 9}, "has 9 values for 6 tokens"),
        ({"logprobs": [0.0, "x"]}, "logprobs: Input should be a valid number"),
        ({"token_ids": [1, 2.7]}, "token_ids: .*fractional part, not 2.7"),
        ({"token_ids": [1, -100]}, "token_ids: .*greater than or equal to 0, not -100"),
        (
            {"token_ids": [[1, 2], [3, 4]], "loss_mask": [[1, 1]]},
            "loss_mask has 1 rows; ",
        ),
        ({"cu_seqlens": [0, 3, 6]}, "several sequences"),
        ({"logprobs": [-1.0] * 6, "position_ids": [0, 1, 2, 0, 1, 2]}, "several sequences"),
    ],
)
def test_a_row_that_is_none_is_refused(changes, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"token_ids": [1, 2, 3, 4, 5, 6], "logprobs": [-1.0] * 2}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | changes)}")
    with pytest.raises(ValueError, match=f"{path}: row 1: .*{said}"):
        read_training_rows(path)


def test_fields_that_are_not_of_rows_are_passed_over(tmp_path):
    places = torch.tensor([[0, 0, 1, 2]])
    batch = {
        "input_ids": torch.tensor([[0, 5, 6, 7]]),
        "logprobs": torch.full((1, 4), -0.5),
        "attention_mask": places > -1,
        "position_ids": places,
        "step": torch.tensor(3),
    }
    torch.save(batch, tmp_path / "batch.pt")
    (row,) = read_training_rows(tmp_path / "batch.pt")
    assert row.ids == (0, 5, 6, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training", "{file}"], "--training is for a server"),
        ([], "name SOURCE and FOLDER"),
        (["--endpoint", "http://127.0.0.1:9"], "name SOURCE and FOLDER"),
        (
            ["a", "--endpoint", "a:9", "--min-input-len", "40"],
            "exceeds --input-len=32",
        ),
        (
            ["--training", "{file}", "--endpoint", "http://127.0.0.1:9"],
            "row 0: it has no such field; expected",
        ),
        (["--training", "{code}", "--endpoint", "http://127.0.0.1:9"], "only lists and tensors"),
        (["--training", "{number}", "--endpoint", "http://127.0.0.1:9"], "a row is int"),
    ],
)
def test_what_cannot_be_asked_ends_with_2(words, message, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "x"}\n')
    code = tmp_path / "batch.pt"
    torch.save(Server, code)
    number = tmp_path / "number.pt"
    torch.save(5, number)
    assert main([each.format(file=file, code=code, number=number) for each in words]) == 2
    assert message in capsys.readouterr().err
