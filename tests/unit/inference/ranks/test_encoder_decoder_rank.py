"""One rank's steps of an encoder-decoder: many tokens cut into micro-batches for the pipeline."""

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.model.step import Segment
from inference.ranks.base import RankBase
from inference.ranks.plan import EncoderRow, StepPlan
from tests.rank_threads import on_ranks
from tests.t5_reference import Reference
from tests.tiny_t5 import TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3

MODEL = TinyT5(positions=400, encoder_layers=4)
PROMPTS = ((5, 9, 2, 38, 17), (11, 23, 7))
# The second sequence begins in the first micro-batch and ends in the last.
ANSWERS = [[(7 * t + t // 40 + n) % 40 for t in range(count)] for n, count in enumerate((130, 390))]


@pytest.mark.parametrize("pp_size", [2, 4])
def test_micro_batches_read_the_encoder_output_of_their_sequences(pp_size, tmp_path):
    tensors = t5_tensors(MODEL)
    tasks = [ia3_scalers(MODEL, seed=seed) for seed in (1, 2)]
    files = tuple(write_ia3(tmp_path / f"{n}.nemo", task, MODEL) for n, task in enumerate(tasks))
    source = write_t5(tmp_path / "t5.nemo", tensors, MODEL)
    folder = convert(
        ConversionRequest(source, tmp_path / "out", 1, "fp32", ia3_checkpoints=files)
    ).ft_dir
    counts = [len(answer) for answer in ANSWERS]
    plan = StepPlan(
        ids=[token for answer in ANSWERS for token in answer],
        segments=tuple(Segment(slot, 0, count) for slot, count in enumerate(counts)),
        output_rows=range(0, sum(counts), 3),
        encoder_rows=tuple(
            EncoderRow(len(prompt), (slot,), task=slot) for slot, prompt in enumerate(PROMPTS)
        ),
        encoder_ids=[token for prompt in PROMPTS for token in prompt],
    )

    def work(rank: RankBase) -> torch.Tensor | None:
        result = rank.run(plan)
        return None if result is None else result.logits[:, : MODEL.vocab_size]

    logits = on_ranks(folder, work, pp_size=pp_size, max_len=400)
    expected = []
    for prompt, answer, task in zip(PROMPTS, ANSWERS, tasks, strict=True):
        reference = Reference(tensors, MODEL, scalers=task)
        expected.append(reference.logits(reference.encode(prompt), answer))
    assert logits is not None
    # Another order of summation.
    np.testing.assert_allclose(logits, torch.cat(expected)[::3], rtol=1e-3, atol=1e-4)
