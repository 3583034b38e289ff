"""T5 and BERT models made by transformers, converted and run by our runtime, agree with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from inference.engine.encoder_engine import EncoderEngine
from inference.engine.encoding import EncodingResult, parse_encoding
from inference.ranks.settings import Placement
from tests.conversions import folder_of
from tests.looks import relative_error
from tests.rank_threads import logits_by, states_by
from tests.tiny_transformers import model_of, write_model

# Relative to the largest value, in fp32: another order of summation.
TOLERANCE = 1e-5
# The tanh form of gelu in place of erf, which is what FasterTransformer always computes.
TANH_TOLERANCE = 2e-3

PROMPT = (5, 9, 2, 38, 17, 11, 23)
ANSWER = (0, 30, 8, 19, 4, 27)


def folder(model: Any, tmp_path: Path, **fields: Any) -> Path:
    model.save_pretrained(tmp_path / "source")
    return folder_of(tmp_path / "source", tmp_path, **fields)


VARIANTS: dict[str, dict[str, Any]] = {
    "t5": {},
    "plain gelu": {"feed_forward_proj": "gelu"},
    "v1.1 and flan": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "ul2": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "mt5": {},
    "short reach": {"relative_attention_max_distance": 5},
    "other epsilon": {"layer_norm_epsilon": 1e-2},
    "many buckets": {"relative_attention_num_buckets": 32},
}


@pytest.mark.parametrize(
    ("variant", "tp_size", "pp_size"),
    [
        *((variant, 4, 2) for variant in VARIANTS),
        *(pytest.param(variant, 1, 1, marks=pytest.mark.long) for variant in VARIANTS),
    ],
)
def test_t5_gives_the_logits_of_transformers(variant, tp_size, pp_size, tmp_path):
    name = "mt5" if variant == "mt5" else "t5"
    model = model_of(name, num_decoder_layers=4, **VARIANTS[variant])
    prompt = PROMPT * 6  # longer than any bucket border of the small distances
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ANSWER])
        ).logits[0]
    ours = logits_by(
        folder(model, tmp_path, tp_size=tp_size),
        prompt,
        ANSWER,
        vocab_size=expected.shape[1],
        tp_size=tp_size,
        pp_size=pp_size,
    )
    assert relative_error(ours, expected) < TOLERANCE


@pytest.mark.parametrize("whole", [False, True], ids=["encoder model", "encoder of a whole model"])
def test_t5_encoder_gives_hidden_states_and_attentions(whole, tmp_path):
    tp_size = 1 if whole else 2
    if whole:
        model = model_of("t5", feed_forward_proj="gated-gelu")
        path, encoder = folder(model, tmp_path, model_type="t5_encoder"), model.encoder
    else:
        encoder = model_of("t5-encoder")
        path = folder(encoder, tmp_path, tp_size=tp_size)
    ids = np.zeros((2, len(PROMPT)), np.uint32)
    ids[0], ids[1, :3] = PROMPT, PROMPT[:3]
    request = {
        "input_ids": ids,
        "sequence_length": np.array([[len(PROMPT)], [3]], np.uint32),
        "is_return_attentions": np.array([[False], [True]]),
    }
    encoder.set_attn_implementation("eager")
    with torch.no_grad():
        expected = encoder(input_ids=torch.tensor([PROMPT]), output_attentions=True)
    with EncoderEngine(path, Placement(tp_size=tp_size, device="cpu")) as engine:
        ours = engine.encode(parse_encoding(request, engine.architecture))
    assert relative_error(ours.hidden[0], expected.last_hidden_state[0]) < TOLERANCE
    assert ours.attentions is not None
    theirs = torch.stack([layer[0] for layer in expected.attentions])
    assert relative_error(ours.attentions[0], theirs) < TOLERANCE
    assert ours.attentions[1, :, :, 3:].abs().max() == 0
    assert ours.hidden[1, 3:].abs().max() == 0


def encode_states(
    path: Path, states: torch.Tensor, lengths: list[int], *, tp_size: int = 1
) -> EncodingResult:
    with EncoderEngine(path, Placement(tp_size=tp_size, device="cpu")) as engine:
        request = {
            "input_hidden_state": states.numpy(),
            "sequence_lengths": np.array(lengths, np.int32)[:, None],
        }
        return engine.encode(parse_encoding(request, engine.architecture))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 2)])
def test_bert_gives_the_hidden_states_of_transformers(activation, tp_size, pp_size, tmp_path):
    model = model_of("bert", hidden_act=activation, num_hidden_layers=4)
    ids, lengths = torch.tensor([[5, 9, 2, 38, 17], [8, 1, 3, 0, 0]]), [5, 3]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        states = model.embeddings(ids)
        expected = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    ours = states_by(
        folder(model, tmp_path, tp_size=tp_size),
        states,
        lengths,
        tp_size=tp_size,
        pp_size=pp_size,
    )
    assert relative_error(ours[mask], expected[mask]) < TOLERANCE


def test_bert_folders_of_other_converters_take_the_tanh_gelu(tmp_path):
    model = model_of("bert")
    ids = torch.tensor([[5, 9, 2, 38, 17]])
    with torch.no_grad():
        states, expected = model.embeddings(ids), model(input_ids=ids).last_hidden_state
    path = folder(model, tmp_path)
    ini = path / "config.ini"
    kept = [line for line in ini.read_text().splitlines() if "exact_gelu" not in line]
    ini.write_text("\n".join(kept))
    (path.parent / f"{path.name}.manifest.json").unlink()
    found = relative_error(encode_states(path, states, [5]).hidden, expected)
    assert TOLERANCE < found < TANH_TOLERANCE


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bert_gives_the_hidden_states_of_padded_texts_of_a_tokenizer(tp_size, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "server", "check", "##point", "."]
    (source / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    write_model("bert", source, vocab_size=len(words), num_hidden_layers=6)
    model = transformers.AutoModel.from_pretrained(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    batch = tokenizer(
        ["a", "a checkpoint ."], ["a server .", "a"], padding=True, return_tensors="pt"
    )
    mask = batch["attention_mask"].bool()
    assert not mask.all()
    assert batch["token_type_ids"].any()
    with torch.no_grad():
        states = model.embeddings(batch["input_ids"], token_type_ids=batch["token_type_ids"])
        expected = model(**batch).last_hidden_state
    ours = encode_states(
        folder_of(source, tmp_path, tp_size=tp_size), states, mask.sum(1).tolist(), tp_size=tp_size
    )
    assert relative_error(ours.hidden[mask], expected[mask]) < TOLERANCE
