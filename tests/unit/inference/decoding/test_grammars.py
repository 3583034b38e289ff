"""Answers of a given form: what is chosen obeys it, whatever the logits say."""

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch

from inference.decoding.grammars import MAX_GRAMMAR_BYTES, Grammars, TokenTexts, compiled
from inference.decoding.request import STRUCTURE, parse_request
from inference.decoding.rows import ModelLimits, SequenceRequest
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams
from tests.unit.inference.decoding.contract_tensors import column, gpt, options, problems

SIZE, END = 300, 256  # bytes, the end token, and ids that the tokenizer lacks
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "kind": {"enum": ["a", "bb"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("llguidance")
    pieces = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    texts = TokenTexts(pieces, [END], lambda text: list(text.encode()))
    return Grammars(lambda: texts, vocab_size=SIZE, end_ids=(END,))


def said(grammars: Grammars, structure: dict[str, Any], *, seed: int = 0, **choice: Any) -> Any:
    """Return the text, and the reason of its end, that random logits give."""
    given = SamplingParams(end_id=END, random_seed=seed, **choice)
    made = grammars.constraint(json.dumps(structure))
    sampler = Sampler(SIZE)
    row = sampler.begin(SequenceRequest((1,), 80, given, (1,), constraint=made))
    generator = torch.Generator().manual_seed(seed)
    while not row.is_finished:
        sampler.step([row], torch.randn(1, SIZE, generator=generator) * 3)
        assert row.error is None
    result = row.result()
    ids = [token for token in result.output_ids[0] if token != END]
    return bytes(ids).decode(), result.finish_reasons[0]


@pytest.mark.parametrize("choice", [{}, {"top_k": 0}, {"top_k": 5}, {"num_log_probs": 2}])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_has_its_form(grammars, choice, seed):
    text, _ = said(grammars, {"regex": "[0-9]{2,4}-[a-f]+x"}, seed=seed, **choice)
    assert set(text) <= set("0123456789-abcdefx")
    picked, reason = said(grammars, {"choice": ["yes", "no"]}, seed=seed, **choice)
    assert (picked in ("yes", "no"), reason) == (True, "stop")
    chosen, _ = said(grammars, {"grammar": 'start: "a" "b"+ "."'}, seed=seed, **choice)
    assert chosen.rstrip(".").strip("b") == "a"


def test_json_of_a_schema_is_json_of_that_schema(grammars):
    whole = 0
    for seed in range(8):
        text, reason = said(grammars, {"json": SCHEMA}, seed=seed, logit_bias=((32, -60.0),))
        assert text.startswith("{")
        if reason != "length":
            whole += 1
            value = json.loads(text)
            assert (type(value["age"]), value["kind"] in ("a", "bb")) == (int, True)
    assert whole


def test_rows_with_and_without_a_form_are_chosen_together(grammars):
    sampler = Sampler(SIZE)
    made = grammars.constraint('{"choice": ["yes"]}')
    options_ = SamplingParams(end_id=END)
    rows = [
        sampler.begin(SequenceRequest((1,), 3, options_, (1,), constraint=each))
        for each in (None, made)
    ]
    logits = torch.zeros(2, SIZE)
    logits[:, 7] = 9.0
    sampler.step(rows, logits)
    assert [row.tokens for row in rows] == [(7,), (ord("y"),)]
    assert [row.rank_chooses for row in rows] == [True, False]


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"jsn": {}},
        {"json": {}, "regex": "a"},
        {"json": [1]},
        {"json": {"type": "frob"}},
        {"regex": "("},
        {"regex": 3},
        {"choice": []},
        {"choice": [1]},
        {"grammar": "start: nowhere"},
    ],
)
def test_what_is_not_a_form_is_refused(structure, grammars):
    with pytest.raises(ValueError, match=r"expected|json|regex|grammar"):
        compiled(structure)


@pytest.mark.parametrize("structure", [{"json": {"$ref": "#"}}, {"grammar": "start: start"}])
def test_a_form_that_no_text_has_is_refused(structure, grammars):
    with pytest.raises(ValueError, match="no text matches this grammar"):
        grammars.constraint(json.dumps(structure))


def test_a_form_that_ends_in_nothing_says_so_in_a_line(grammars):
    constraint = grammars.constraint(json.dumps({"grammar": 'start: "a" x\nx: x'}))
    constraint.take(ord("a"))
    assert not constraint.mask().any()
    assert constraint.problem.startswith("no token can follow")
    assert "\n" not in constraint.problem


def test_a_request_states_the_form_of_each_row(grammars):
    limits = ModelLimits(vocab_size=SIZE, start_id=1, end_id=END, grammars=grammars)
    text = column(b'{"choice": ["a"]}', b"", dtype=np.object_)
    request = parse_request(gpt(**{STRUCTURE: text}), limits)
    assert [row.constraint is None for row in request.rows] == [False, True]
    wide = gpt(**{STRUCTURE: text, "beam_width": column(2, 2)})
    assert problems(wide, limits) == [f"{STRUCTURE}: needs beam_width=1"]
    for wrong in (b"[]", b"{", b"\xff", b" " * (MAX_GRAMMAR_BYTES + 1)):
        sent = {STRUCTURE: column(wrong, b"", dtype=np.object_)}
        (problem,) = problems(gpt(**sent), limits)
        assert problem.startswith(STRUCTURE)
    assert options(parse_request(gpt(), limits), "end_id") == [END, END]


def test_without_the_package_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="pip install llguidance"):
        compiled({"regex": "a"})
