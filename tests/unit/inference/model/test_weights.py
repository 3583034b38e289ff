"""A rank's tensors come in the type they are computed in, matrices in the one they are kept in."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from inference.model.weights import LayerLoader, RankWeights
from inference.parallel.layout import ParallelLayout
from tests.ft_folders import write_gpt

CPU = torch.device("cpu")


def open_weights(ft_dir: Path, matrix_dtype: torch.dtype | None) -> RankWeights:
    return RankWeights(
        FTReader(ft_dir),
        ParallelLayout(),
        dtype=torch.float32,
        device=CPU,
        matrix_dtype=matrix_dtype,
    )


def test_only_matrices_take_the_type_they_are_kept_in(tmp_path):
    weights = open_weights(write_gpt(tmp_path), torch.float16)
    layer = "model.layers.0."
    matrix = weights.matrix(layer + "attention.query_key_value.weight")
    assert isinstance(matrix, torch.Tensor)
    assert matrix.shape == (24, 72)
    assert matrix.dtype == torch.float16
    assert weights.rows("model.wte", range(3, 9), is_matrix=True).dtype == torch.float16
    assert weights.tensor(layer + "mlp.dense_h_to_4h.bias").dtype == torch.float32
    assert weights.rows("model.wte", range(3, 9)).dtype == torch.float32


def test_a_table_that_is_embedding_and_head_is_held_once(tmp_path):
    weights = open_weights(write_gpt(tmp_path), None)
    table = weights.rows("model.wte", range(3, 9))
    assert weights.rows("model.wte", range(3, 9), is_matrix=True).data_ptr() == table.data_ptr()
    assert weights.rows("model.wte", range(9)).data_ptr() != table.data_ptr()


def test_a_scale_that_is_not_finite_is_reported_once(tmp_path):
    ft_dir = write_gpt(tmp_path)
    norm = "model.layers.0.input_layernorm"
    np.full(24, np.nan, np.float32).tofile(ft_dir / f"{norm}.weight.bin")
    weights = open_weights(ft_dir, None)
    architecture = weights.reader.config.architecture()
    assert isinstance(architecture, DecoderArchitecture)
    LayerLoader(weights, replace(architecture, norm_one_plus=True)).norm(norm)
    with pytest.raises(CheckpointMismatchError) as error:
        weights.check()
    assert str(error.value).count(norm) == 1
