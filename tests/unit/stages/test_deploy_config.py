"""Places in object stores, and the arguments of NVIDIA's tuning programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from export_scripts.triton.object_store import StoreLocation
from stages.deploy_config import DeployConfig, GemmTuning, store_location
from stages.gemm_tuning import tuning_command


def test_folder_is_no_place_in_a_store() -> None:
    assert store_location(None, None) is None
    assert store_location("/repository", None) is None


def test_place_in_a_store_is_served_instead_of_the_folder(tmp_path: Path) -> None:
    location = store_location("s3://bucket/a/b", "http://store:9000")
    assert location == StoreLocation("bucket", "a/b", "http://store:9000")
    config = DeployConfig(repository=tmp_path, model_name="m", store=location)
    assert config.source == "s3://http://store:9000/bucket/a/b"


@pytest.mark.parametrize(
    ("repository", "endpoint_url", "key"),
    [
        ("s3://user:hunter2@bucket/a", None, "deploy.repository"),
        ("s3://bucket/a", "http://user:hunter2@store:9000", "deploy.endpoint_url"),
    ],
)
def test_password_in_an_address_is_refused_and_not_repeated(
    repository: str, endpoint_url: str | None, key: str
) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        store_location(repository, endpoint_url)
    assert "hunter2" not in str(caught.value)


def test_endpoint_without_a_store_is_refused() -> None:
    with pytest.raises(ValueError, match=r"deploy\.endpoint_url is the address of an object store"):
        store_location(None, "http://store:9000")


def write_ini(repository: Path, text: str) -> DeployConfig:
    weights = repository / "m" / "1" / "2-gpu"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text(text)
    return DeployConfig(
        repository=repository,
        model_name="m",
        tp_size=2,
        data_type="fp16",
        engine="fastertransformer",
        gemm_tuning=GemmTuning(4, 2, 60, Path("/p")),
    )


def test_arguments_of_t5_name_both_stacks(tmp_path: Path) -> None:
    stack = (
        "vocab_size = 131\nd_model = 32\nd_kv = 12\nd_ff = 88\nnum_heads = 4\n"
        "feed_forward_proj = relu\nrelative_attention_num_buckets_or_max_pos_seq_len = 8\n"
        "weight_data_type = fp32\ntensor_para_size = 2\n_name_or_path = x\nnum_layers = 2\n"
    )
    ids = "decoder_start_token_id = 0\neos_token_id = 1\n"
    config = write_ini(tmp_path, f"[encoder]\n{stack}[decoder]\n{stack}{ids}[structure]\n")
    words = "4 2 60 32 4 12 88 32 4 12 88 131 1 2 1"
    assert tuning_command(config) == ["/p/t5_gemm", *words.split()]


def test_arguments_of_bert_are_those_of_an_encoder(tmp_path: Path) -> None:
    config = write_ini(
        tmp_path,
        "[bert]\nmodel_name = x\nhead_num = 4\nsize_per_head = 8\ninter_size = 88\nnum_layer = 2\n"
        "weight_data_type = fp32\ntensor_para_size = 2\n",
    )
    assert tuning_command(config) == ["/p/bert_gemm", *["4", "60", "4", "8", "1", "0"]]
