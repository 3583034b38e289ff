"""The build_repository command: flags become a request, problems become exit status 1."""

from pathlib import Path

import pytest

from export_scripts.build_repository import main
from export_scripts.triton.model_config import parse_config

CONFIG_INI = """[gpt]
model_name = tiny
tensor_para_size = 1
head_num = 4
size_per_head = 6
inter_size = 56
num_layer = 2
max_pos_seq_len = 40
weight_data_type = fp32
vocab_size = 52
start_id = 50
end_id = 51
"""


@pytest.fixture
def model_dir(tmp_path) -> Path:
    weights = tmp_path / "repo" / "gpt" / "1" / "1-gpu"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text(CONFIG_INI)
    return tmp_path / "repo" / "gpt"


def test_flags_reach_the_configuration(model_dir, capsys):
    flags = ["--no-ensemble", "--decoupled", "--max-batch-size", "7", "--parameter", "device=cpu"]
    assert main([str(model_dir), *flags]) == 0
    assert capsys.readouterr().out == f"{model_dir}\n"
    config = parse_config((model_dir / "config.pbtxt").read_text())
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 7
    assert config.parameters["device"].string_value == "cpu"


def test_problems_are_reported_in_the_words_of_the_command(model_dir, capsys):
    assert main([str(model_dir), "--data-type", "fp8", "--tensor-model-parallel-size", "0"]) == 1
    error = capsys.readouterr().err
    assert "error: --tensor-model-parallel-size=0 must be a whole number" in error
    assert "error: --data-type=fp8 must be one of fp32, fp16, bf16." in error
    assert main([str(model_dir), "--parameter", "device"]) == 1
    assert "--parameter device is not KEY=VALUE" in capsys.readouterr().err
    assert not (model_dir / "config.pbtxt").exists()


T5_ENCODER_INI = """[encoder]
_name_or_path = t5
weight_data_type = fp32
tensor_para_size = 1
vocab_size = 40
d_model = 24
d_kv = 6
d_ff = 40
num_heads = 4
num_layers = 2
feed_forward_proj = relu
relative_attention_num_buckets_or_max_pos_seq_len = 8
eos_token_id = 1
[decoder]
[structure]
"""


def test_encoder_alone_gets_a_tokenizer_that_ends_texts(tmp_path, capsys):
    model_dir = tmp_path / "repo" / "t5_encoder"
    weights = model_dir / "1" / "1-gpu"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text(T5_ENCODER_INI)
    (weights / "vocab.txt").write_text("[UNK]\n")
    assert main([str(model_dir)]) == 0
    config = parse_config((model_dir.parent / "tokenizer" / "config.pbtxt").read_text())
    assert config.parameters["end_id"].string_value == "1"
    assert config.parameters["append_end_id"].string_value == "1"
    assert "start_id" not in config.parameters
    (weights / "config.ini").write_text(T5_ENCODER_INI.replace("eos_token_id = 1\n", ""))
    assert main([str(model_dir)]) == 1
    assert "does not say which token ends a text; add eos_token_id" in capsys.readouterr().err
