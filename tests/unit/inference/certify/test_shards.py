"""The ranks of a folder as threads of the comparison's process."""

from time import monotonic
from typing import Any

import pytest

from export_scripts.ft.reader import FTReader
from inference.certify.activations import ModelInputs
from inference.certify.shards import run_shards
from inference.ranks.decoder_rank import DecoderRank
from tests.ft_folders import write_gpt


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_a_step_ends_the_others(failing, tmp_path, monkeypatch):
    run = DecoderRank._run

    def fail(self: DecoderRank, *inputs: Any) -> Any:
        if self.layout.rank == failing:
            raise MemoryError("no room for a step")
        return run(self, *inputs)

    monkeypatch.setattr(DecoderRank, "_run", fail)
    monkeypatch.setattr("inference.certify.shards._TIMEOUT_S", 15.0)
    reader = FTReader(write_gpt(tmp_path, tp_size=2))
    began = monotonic()
    with pytest.raises(MemoryError, match="no room for a step"):
        run_shards(reader, ModelInputs((5, 9, 2)))
    assert monotonic() - began < 10
