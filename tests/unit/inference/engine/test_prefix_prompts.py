"""Prefix prompts: keys and values loaded for each task act as the tokens they were taken from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.families.gptj import GPTJ, GPTJConfig
from export_scripts.families.layout.config import PromptTask
from inference.decoding.rows import RequestError, SessionTurn
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.model.kv_cache import prefix_source
from inference.model.step import Segment
from inference.ranks.base import RankBase
from inference.ranks.plan import StepPlan
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.ft_folders import gpt_config, write_gpt, write_random
from tests.rank_threads import logits_of, on_ranks

TASKS = (PromptTask(task_name="one", prompt_length=2), PromptTask(task_name="two", prompt_length=3))
MEANING = {"one": [7, 8], "two": [9, 10, 11]}


def write_family(family: str, target: Path, *, tp_size: int = 1, **changes: Any) -> Path:
    if family == "gpt":
        return write_gpt(target, tp_size=tp_size, **changes)
    shared = gpt_config(tp_size=tp_size)
    names = ["model_name", "head_num", "size_per_head", "inter_size", "num_layer", "vocab_size"]
    names += ("start_id", "end_id", "weight_data_type", "tensor_para_size")
    values = {name: getattr(shared, name) for name in names}
    return write_random(GPTJ, GPTJConfig(**values, rotary_embedding=4, **changes), target)


def cached(ft_dir: Path, tokens: list[int]) -> torch.Tensor:
    """Return what a plain model caches for tokens, (layers, 2, heads, tokens, size)."""
    plan = StepPlan(tokens, (Segment(0, 0, len(tokens)),), [len(tokens) - 1])

    def work(rank: RankBase) -> torch.Tensor:
        rank.run(plan)
        read = rank.cache.reader(0, 1, len(tokens))
        parts = [torch.stack(read(layer)) for layer in range(rank.cache.shape.num_layer)]
        return torch.stack(parts)[:, :, 0]  # one slot

    return on_ranks(ft_dir, work)


def write_prefixes(family: str, target: Path, *, tp_size: int = 1) -> Path:
    """Write a model whose tasks' prefixes are what it caches for their meaning."""
    plain = write_family(family, target / "plain")
    changes: dict[str, Any] = {"tasks": TASKS, "prompt_learning_type": 2}
    ft_dir = write_family(family, target / "prefixed", tp_size=tp_size, **changes)
    for name, tokens in MEANING.items():
        for number, part in enumerate(cached(plain, tokens).chunk(tp_size, dim=2)):
            path = ft_dir / f"model.prefix_prompt.{name}.weight.{number}.bin"
            part.contiguous().numpy().tofile(path)
    return ft_dir


def check(engine: Engine, **options: Any) -> None:
    ids = [[3, 20, 4], [5, 6]]
    prefixed = engine.generate(
        request_of(engine, ids, prompt_learning_task_name_ids=[1, 0], **options)
    ).rows
    whole = [MEANING["two"] + ids[0], MEANING["one"] + ids[1]]
    alone = engine.generate(request_of(engine, whole, **options)).rows
    assert [row.output_ids for row in prefixed] == [row.output_ids for row in alone]


@pytest.mark.parametrize(("family", "block_tokens"), [("gpt", 0), ("gptj", 0), ("gptj", 2)])
def test_a_prefix_acts_as_the_tokens_it_was_taken_from(family, block_tokens, tmp_path):
    options = EngineOptions(kv_block_tokens=block_tokens)
    folder = write_prefixes(family, tmp_path)
    with Engine(folder, Placement(device="cpu"), options=options) as engine:
        check(engine)
        check(engine, beam_width=3)
        assert engine.load().running == 0


def test_ranks_and_stages_hold_their_part_of_the_prefixes(tmp_path):
    folder, meaning, ids = write_prefixes("gptj", tmp_path, tp_size=2), MEANING["two"], [3, 20, 4]
    whole = logits_of(tmp_path / "plain" / "1-gpu", meaning + ids, tp_size=1, pp_size=1)
    move = (prefix_source(1), 0, 0, len(meaning))
    plan = StepPlan(ids, (Segment(0, len(meaning), len(ids)),), range(len(ids)), moves=(move,))

    def work(rank: RankBase) -> torch.Tensor | None:
        result = rank.run(plan)
        return None if result is None else result.logits[:, : whole.shape[1]]

    logits = on_ranks(folder, work, tp_size=2, pp_size=2)
    assert logits is not None
    torch.testing.assert_close(logits, whole[len(meaning) :], rtol=1e-4, atol=1e-4)


def test_prefixes_count_as_cached_tokens_and_stay_out_of_continuations(tmp_path):
    with Engine(write_prefixes("gpt", tmp_path), Placement(device="cpu")) as engine:
        long = [[1] * 72]
        assert engine.generate(request_of(engine, long, prompt_learning_task_name_ids=0)).rows
        with pytest.raises(RequestError, match=r"prompt \(76\) .* exceeds max_pos_seq_len \(80\)"):
            engine.submit(request_of(engine, [[1] * 73], prompt_learning_task_name_ids=1))
        with pytest.raises(RequestError, match="at least 2 tokens"):
            request_of(engine, [[1]], prompt_learning_task_name_ids=1)
        first = request_of(engine, [[1, 2]], prompt_learning_task_name_ids=1, session_len=40)
        engine.generate(first, turn=SessionTurn(1, starts=True))
        with pytest.raises(RequestError, match="a virtual prompt precedes all tokens"):
            engine.generate(
                request_of(engine, [[1, 2]], prompt_learning_task_name_ids=1), turn=SessionTurn(1)
            )
        answer = engine.generate(request_of(engine, [[1, 2]]), turn=SessionTurn(1))
        assert len(answer.request.rows[0].returned_ids) == 2 + 6 + 2
