"""Virtual prompts: tables loaded by task, tables and soft prompts sent with a request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.families.layout.config import PromptTask
from inference.decoding.rows import RequestError
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.ft_folders import write_gpt

VOCAB, HIDDEN = 53, 24
START = 60
TASKS = (PromptTask(task_name="one", prompt_length=2), PromptTask(task_name="two", prompt_length=3))
# Tokens whose embeddings the tables repeat: a virtual prompt must act as these tokens do.
MEANING = {"one": [7, 8], "two": [9, 10, 11]}


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ft_dir = write_gpt(
        tmp_path_factory.mktemp("gpt"),
        tasks=TASKS,
        prompt_learning_type=3,
        prompt_learning_start_id=START,
    )
    words = table(ft_dir)
    for name, tokens in MEANING.items():
        words[tokens].tofile(ft_dir / f"model.prompt_table.{name}.weight.bin")
    return ft_dir


@pytest.fixture(scope="module", params=[None, 2], ids=["slots", "shared blocks"])
def engine(ft_dir: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = EngineOptions(kv_block_tokens=request.param)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        yield engine


def table(ft_dir: Path) -> Any:
    return np.fromfile(ft_dir / "model.wte.bin", np.float32).reshape(VOCAB, HIDDEN)


def answers(engine: Engine, prompts: list[list[int]], **tensors: Any) -> list[list[int]]:
    request = request_of(engine, prompts, 9, **tensors)
    return [list(row.output_ids[0]) for row in engine.generate(request).rows]


def test_each_row_reads_the_table_of_its_task(engine):
    virtual = [[START, START + 1, 5, 6], [START + 2, 4, START, START + 1]]
    expected = answers(engine, [[7, 8, 5, 6], [11, 4, 9, 10]])
    assert answers(engine, virtual, prompt_learning_task_name_ids=[0, 1]) == expected


def test_equal_ids_of_different_tasks_share_nothing(engine):
    for task, meaning in enumerate(MEANING.values()):
        virtual = [[START, START + 1, 5, 6, 7]]
        expected = answers(engine, [[*meaning[:2], 5, 6, 7]])
        assert answers(engine, virtual, prompt_learning_task_name_ids=task) == expected


def test_table_sent_with_the_request_is_used_instead(engine, ft_dir):
    rows = table(ft_dir)[[[20, 21], [22, 23]]]  # (2, 2, hidden)
    sent = answers(
        engine,
        [[START, START + 1, 5], [3, START + 1, START]],
        request_prompt_embedding=rows,
        request_prompt_lengths=2,
        request_prompt_type=3,
    )
    assert sent == answers(engine, [[20, 21, 5], [3, 23, 22]])


def test_virtual_tokens_have_no_score_wherever_they_come_from(engine, ft_dir):
    asked: dict[str, Any] = {"is_return_log_probs": True, "is_return_context_cum_log_probs": True}
    loaded: dict[str, Any] = {"prompt_learning_task_name_ids": 0}
    sent = {
        "request_prompt_embedding": table(ft_dir)[[MEANING["one"]]],
        "request_prompt_lengths": 2,
        "request_prompt_type": 3,
    }
    ids = [[START, START + 1, 5, 6]]
    first, second = (
        engine.generate(request_of(engine, ids, 1, **asked, **prompt)).rows[0].cum_log_probs
        for prompt in (loaded, sent)
    )
    assert np.isfinite(first).all()
    assert first == pytest.approx(second, abs=1e-5)


def test_unknown_task_is_refused(engine):
    with pytest.raises(RequestError, match=r"prompt_learning_task_name_ids\[0\]=2 is unknown"):
        answers(engine, [[START, 5]], prompt_learning_task_name_ids=2)
