"""All ranks of a model as threads of this process, talking over gloo: the logits of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from inference.model.step import Segment
from inference.parallel.groups import RankGroups
from inference.serving.plan import StepPlan, pack, unpack
from inference.serving.rank import Rank
from inference.serving.rank_settings import RankSettings

_TIMEOUT_S = 60.0


def logits_of(
    ft_dir: Path,
    prompt: Sequence[int],
    *,
    tp_size: int,
    pp_size: int,
    data_type: str = "fp32",
    chunks: Sequence[int] = (),
    shared_memory: bool = True,
) -> torch.Tensor:
    """Return (tokens, vocabulary) fp32, the prompt cut into `chunks` if given."""
    world_size = tp_size * pp_size
    store = HashStore()

    def run(number: int) -> torch.Tensor | None:
        torch.set_num_threads(1)
        settings = RankSettings(
            ft_dir=str(ft_dir),
            rank=number,
            tp_size=tp_size,
            pp_size=pp_size,
            data_type=data_type,
            device="cpu",
            lanes=2,
            max_len=len(prompt),
            threads=1,
        )
        rank = Rank(settings)
        if world_size > 1:
            groups = RankGroups(
                settings.layout,
                store,
                device=torch.device("cpu"),
                timeout_s=_TIMEOUT_S,
                shared_memory=shared_memory,
            )
            rank.connect(groups)
        parts, start = [], 0
        for count in chunks or (len(prompt),):
            plan = StepPlan(
                ids=list(prompt[start : start + count]),
                segments=(Segment(1, start, count),),
                output_rows=range(count),
            )
            start += count
            result = rank.run(unpack(pack(plan)))
            parts.append(result and result.logits)
        if number == 0:
            vocab_size = rank.architecture.vocab_size
            return torch.cat([part[:, :vocab_size] for part in parts if part is not None])
        return None

    with ThreadPoolExecutor(world_size) as pool:
        results = [
            task.result(_TIMEOUT_S) for task in [pool.submit(run, n) for n in range(world_size)]
        ]
    logits = results[0]
    assert logits is not None
    return logits
