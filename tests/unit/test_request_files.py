"""The request files of examples/requests: each fits the inputs of the model that it asks."""

import json
from pathlib import Path

import numpy as np
import pytest

from export_scripts.triton.signature import (
    GPT,
    MODEL_SIGNATURES,
    T5,
    TOKENIZER,
    ModelSignature,
    ensemble,
)
from inference.server.tensors import file_tensors
from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "requests"
MODELS: dict[str, ModelSignature] = {
    "sample_request.json": GPT,
    "sample_request_runtime_top_k.json": GPT,
    "sample_request_single.json": GPT,
    "sample_request_stream.json": GPT,
    "sample_request_ensemble.json": ensemble(GPT),
    "sample_request_single_t5.json": T5,
    "sample_request_single_t5_ia3.json": T5,
    "sample_request_stream_t5.json": T5,
    "sample_request_single_t5_encoder.json": MODEL_SIGNATURES["T5-Encoder"],
    "sample_request_tokenizer.json": TOKENIZER,
}
TYPES = {
    "UINT32": "uint32", "INT32": "int32", "UINT64": "uint64", "FP32": "float32", "BOOL": "bool",
    "BYTES": "object",
}  # fmt: skip


def test_every_file_is_known():
    assert {path.name for path in FOLDER.iterdir()} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_file_fits_its_model(name):
    content = json.loads(Path(FOLDER / name).read_text())
    tensors = file_tensors(content["request"])
    declared = {tensor.name: tensor for tensor in MODELS[name].inputs}
    assert {each.name for each in declared.values() if not each.optional} <= set(tensors)
    assert set(tensors) <= set(declared)
    rows = {len(tensor) for tensor in tensors.values()}
    assert len(rows) == 1
    for tensor_name, value in tensors.items():
        assert value.dtype == np.dtype(TYPES[declared[tensor_name].dtype])
        sizes = declared[tensor_name].dims
        assert value.ndim == 1 + len(sizes)
        assert all(size in (-1, given) for size, given in zip(sizes, value.shape[1:], strict=True))
    assert content.get("config", {}).get("stream_api", False) == ("stream" in name)
