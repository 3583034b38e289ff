"""Tests of what a server reads in a repository."""

from export_scripts.triton.model_config import parse_config
from inference.front.workers import Workers
from inference.host.hosted import weights_of
from inference.host.models import HostedModel
from inference.host.repository import Repository


def test_what_a_configuration_leaves_out_is_as_in_tritonserver(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    text = 'backend: "fastertransformer" input { dims: 1 } sequence_batching { direct {} }'
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    found = Repository(tmp_path, on_failure=print, workers=Workers(1))
    assert found.orders["m"].arguments.session_idle_s == 1.0
    config, _ = found.configs["m"]
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000


def test_weights_are_where_the_engine_finds_them(tmp_path):
    values = {"tensor_para_size": 1, "pipeline_para_size": 1, "data_type": "fp32"}
    values |= {"model_type": "GPT"}
    texts = (
        f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in values.items()
    )
    text = 'name: "m" default_model_filename: "shards" ' + " ".join(texts)
    model = HostedModel(parse_config(text), "1")
    assert weights_of(model, tmp_path) is None
    folder = tmp_path / "m" / "1" / "shards"
    folder.mkdir(parents=True)
    (folder / "config.ini").touch()
    assert weights_of(model, tmp_path) == folder
    assert weights_of(model, None) is None
