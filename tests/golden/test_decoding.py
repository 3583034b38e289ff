"""Decoding against recorded vectors, every case of every file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.reference_choice  # noqa: F401 - ranks choose on CPUs, too
from inference.decoding.draws import NO_MARKS, Penalty, Xorwow
from inference.decoding.outputs import assemble_outputs
from inference.decoding.processors import LogitRules, process_logits, temperature_factor
from inference.decoding.request import parse_request
from inference.decoding.rows import ModelLimits, SequenceRequest, SequenceResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling import SampledAnswer
from inference.decoding.sampling_params import (
    SamplingParams,
    normalise_selection,
    read_options,
)
from inference.decoding.tensor_fields import TensorFields
from inference.decoding.word_lists import banned_ids, ends_with, read_entries
from inference.model.token_feed import TokenFeed
from tests.conftest import SHARED

FOLDER = SHARED / "golden" / "decoding"
# Draws closer than this to a decision boundary may fall either way.
MARGIN = 1e-5
LOG_PROB_TOLERANCE = 2e-5  # FP32 softmax on one side, on the other FP32 or FP64

Case = dict[str, Any]


def cases(name: str) -> list[Any]:
    """Return the cases of a file as parameters; none, and so a skip, where it is missing."""
    path = Path(FOLDER) / f"{name}.json"
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return [pytest.param(case, id=f"{name}-{i}") for i, case in enumerate(found)]


def row(
    options: SamplingParams, *, context: tuple[int, ...] = (0, 0), output_len: int
) -> SequenceRequest:
    return SequenceRequest(context, output_len, options, context_ids=context, returned_ids=context)


@pytest.mark.parametrize("case", cases("xorwow"))
def test_generator_gives_the_recorded_words_and_uniforms(case):
    words, uniforms = Xorwow(int(case["seed"])), Xorwow(int(case["seed"]))
    assert [words.word() for _ in case["words"]] == case["words"]
    assert [uniforms.uniform() for _ in case["uniforms"]] == case["uniforms"]


@pytest.mark.parametrize("case", cases("topk_topp_arguments"))
def test_selection_arguments_are_normalised(case):
    k, p, _ = normalise_selection(case["runtime_top_k"] or 0, case["runtime_top_p"] or 0.0)
    assert (k, p) == (case["k"], case["p"])
    assert ("top_k" if k > 0 else "top_p") == case["path"]


@pytest.mark.parametrize("case", cases("temperature"))
def test_temperature_scales_the_real_vocabulary(case):
    temperatures = case["temperatures"]
    processed = process_logits(
        torch.tensor(case["logits"]),
        slots=range(len(temperatures)),
        rules=[LogitRules(temperature_factor(t)) for t in temperatures],
        vocab_size=case["vocab"],
    )
    # A row at exactly 1 is left alone whatever its neighbours; the recorded mixed batches scale
    # it by 1 / (1 + 1e-6), which FP32 rounds to 9.54e-7 plus half a unit in the last place.
    np.testing.assert_allclose(
        processed[:, : case["vocab"]].numpy(), np.float32(case["expected"]), rtol=1.1e-6
    )
    assert torch.isneginf(processed[:, case["vocab"] :]).all()


@pytest.mark.parametrize("case", cases("repetition_presence"))
def test_penalty_acts_once_on_each_id_seen(case):
    seen = np.asarray(case["padded_prompt"][: case["input_length"]] + case["generated"])
    assert sorted(set(seen.tolist())) == case["penalised"]
    repetition, presence = {"repetition": (case["value"], 0), "presence": (1, case["value"])}[
        case["kind"]
    ]
    rules = LogitRules(penalty=Penalty(repetition, presence, 0), marks=NO_MARKS._replace(seen=seen))
    size = len(case["logits"])
    logits = torch.tensor([case["logits"]])
    x = process_logits(logits, slots=[0], rules=[rules], vocab_size=size)[:, :size]
    np.testing.assert_allclose(x[0].numpy(), np.float32(case["expected"]), rtol=1e-6)


@pytest.mark.parametrize("case", cases("repetition_presence"))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_penalise_each_id_seen(case, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("a CUDA device is needed")
    prompt = tuple(case["padded_prompt"][: case["input_length"]])
    options = SamplingParams(end_id=99, **{f"{case['kind']}_penalty": case["value"]})
    sampler = Sampler(vocab_size=(size := len(case["logits"])))
    decoded = sampler.begin(row(options, context=prompt, output_len=99))
    assert isinstance(decoded, SampledAnswer)
    for token in case["generated"]:
        decoded.append(token)
    penalty = decoded.penalty(len(case["generated"]))
    feed = TokenFeed(size, torch.device(device), vocab=range(size))
    for slot in range(size):  # which may choose one id only
        others = np.delete(np.arange(size), slot)
        bans = np.full(len(others), -np.inf, np.float32)
        feed.mark(slot, decoded.marks().seen, others, bans)
    slots = torch.arange(size, device=device)
    chosen = feed.choose(
        torch.tensor([case["logits"]] * size, device=device),
        *(slots, torch.full_like(slots, -1)),
        torch.tensor([decoded.draw()] * size, device=device),
        torch.tensor([penalty] * size, dtype=torch.float32, device=device),
    )
    assert chosen[:, 1].tolist() == list(range(size))
    values = chosen[:, 0].contiguous().view(torch.float32).cpu().numpy()
    np.testing.assert_allclose(values, np.float32(case["expected"]), rtol=1e-6)


@pytest.mark.parametrize("case", cases("min_length"))
def test_end_token_is_barred_until_the_minimum_length(case):
    end_id = case["end_id"]
    for length, allowed in enumerate(case["end_allowed_at_generated_index"]):
        sampler = Sampler(vocab_size=6)
        options = SamplingParams(end_id=end_id, min_length=case["min_length"])
        decoded = sampler.begin(row(options, output_len=length + 1))
        for _ in range(length):
            sampler.step([decoded], torch.eye(6)[[4]])
        sampler.step([decoded], torch.eye(6)[[end_id]])
        assert (decoded.tokens == (end_id,)) == allowed


@pytest.mark.parametrize("case", cases("top_p_decay"))
def test_nucleus_shrinks_and_resets(case):
    # None: the request does not say.
    given = {"runtime_top_p": case["top_p"]}
    given |= {name: case[name] for name in ("top_p_decay", "top_p_min", "top_p_reset_ids")}
    tensors = {
        name: np.array([[value]], np.int32 if name == "top_p_reset_ids" else np.float32)
        for name, value in given.items()
        if value is not None
    }
    (options,), _ = read_options(TensorFields(tensors, 1), start_id=0, end_ids=(19,))
    sampler = Sampler(vocab_size=20)
    decoded = sampler.begin(row(options, output_len=len(case["tokens"]) + 1))
    assert isinstance(decoded, SampledAnswer)
    sizes = [decoded.top_p]
    for token in case["tokens"]:
        sampler.step([decoded], torch.eye(20)[[token]] * 50)  # one token holds all the mass
        sizes.append(decoded.top_p)
    assert decoded.result().output_ids == (tuple(case["tokens"]),)
    np.testing.assert_allclose(sizes, case["p_before_each_draw_and_after_last"], rtol=1e-6)


@pytest.mark.parametrize("case", cases("sampling"))
@pytest.mark.parametrize("mode", ["renormalized", "full"])
def test_sampled_tokens_and_log_probs(case, mode):
    k, p, _ = normalise_selection(case["runtime_top_k"] or 0, case["runtime_top_p"] or 0.0)
    options = SamplingParams(
        end_id=case["vocab"],
        top_k=k,
        top_p=p,
        random_seed=int(case["random_seed"]),
        return_log_probs=True,
    )
    sampler = Sampler(vocab_size=case["vocab"], output_log_probs_mode=mode)
    decoded = sampler.begin(row(options, output_len=len(case["steps"])))
    expected_log_probs = []
    for step in case["steps"]:
        sampler.step([decoded], torch.tensor([step["logits"]]))
        assert step["margin"] >= MARGIN, "the vectors hold no undecidable draw"
        assert decoded.tokens == (step["token"],)
        expected_log_probs.append(step["output_logp" if mode == "renormalized" else "full_logp"])
        (cum,) = decoded.result().cum_log_probs
        assert cum == pytest.approx(step["cum_log_prob"], abs=LOG_PROB_TOLERANCE)
    (log_probs,) = decoded.result().output_log_probs
    np.testing.assert_allclose(log_probs, expected_log_probs, atol=LOG_PROB_TOLERANCE)


@pytest.mark.parametrize("case", cases("sampling"))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_that_ranks_sample(case, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("a CUDA device is needed")
    k, p, _ = normalise_selection(case["runtime_top_k"] or 0, case["runtime_top_p"] or 0.0)
    options = SamplingParams(
        end_id=case["vocab"], top_k=k, top_p=p, random_seed=int(case["random_seed"])
    )
    sampler = Sampler(vocab_size=case["vocab"])
    decoded = sampler.begin(row(options, output_len=len(case["steps"])))
    assert isinstance(decoded, SampledAnswer)
    feed = TokenFeed(1, torch.device(device), vocab=range(case["vocab"]))
    nothing, slots = torch.tensor([[-1], [0]], device=device)
    for step in case["steps"]:
        chosen = feed.choose(
            torch.tensor([step["logits"]], device=device),
            *(slots, nothing),
            torch.tensor([decoded.draw()], device=device),
        )
        decoded.append(int(chosen[0, 1]))
    assert decoded.result().output_ids == (tuple(s["token"] for s in case["steps"]),)


@pytest.mark.parametrize("case", cases("bad_words"))
def test_bad_words_ban_their_last_token(case):
    entries = read_entries(*np.asarray(case["bad_words_list"]))
    assert entries is not None
    banned = banned_ids(case["history"], entries, vocab_size=16)
    assert sorted(set(banned)) == case["banned"]


@pytest.mark.parametrize("case", cases("stop_words"))
def test_stop_words_match_the_newest_tokens(case):
    entries = read_entries(*np.asarray(case["stop_words_list"]))
    assert entries is not None
    assert ends_with(case["history"], entries) == case["finished"]


def search(case: Case, *, prompt: list[int], output_len: int, pool: bool) -> tuple[Any, int]:
    """Run a beam search over the case's Markov table; return the result and the steps taken."""
    table, bias = torch.tensor(case["markov_logits"]), torch.tensor(case["step_bias"])
    options = SamplingParams(
        end_id=case["end_id"],
        beam_width=case["beam_width"],
        len_penalty=case["len_penalty"],
        beam_search_diversity_rate=case["beam_search_diversity_rate"],
        return_log_probs=True,
    )
    sampler = Sampler(vocab_size=len(table), hypothesis_pool=pool)
    decoded = sampler.begin(row(options, context=tuple(prompt), output_len=output_len))
    newest = [prompt[-1]] * case["beam_width"]
    for n in range(output_len):
        sampler.step([decoded], table[newest] + bias[n])
        newest = list(decoded.tokens)
        if decoded.is_finished:
            break
    return decoded.result(), n + 1


@pytest.mark.parametrize("case", cases("beam_gpt"))
def test_beam_search_keeps_finished_beams(case):
    prompt = case["prompt"]
    result, steps = search(case, prompt=prompt, output_len=case["request_output_len"], pool=False)
    assert steps == case["steps_run"]
    for k, beam in enumerate(case["beams"]):
        tokens = prompt + list(result.output_ids[k])
        tokens += [case["end_id"]] * (len(beam["ids"]) - len(tokens))
        assert tokens == beam["ids"]
        assert result.cum_log_probs[k] == pytest.approx(
            beam["cum_log_prob"], abs=LOG_PROB_TOLERANCE
        )
        assert sum(result.output_log_probs[k]) == pytest.approx(
            beam["cum_log_prob"], abs=LOG_PROB_TOLERANCE
        )


@pytest.mark.parametrize("case", cases("beam_t5"))
def test_beam_search_with_a_pool(case):
    result, steps = search(
        case, prompt=[case["start_id"]], output_len=case["max_output_len"], pool=True
    )
    assert steps == case["steps_run"]
    assert len(result.output_ids) == len(case["hypotheses"])
    for k, hypothesis in enumerate(case["hypotheses"]):
        assert list(result.output_ids[k]) == hypothesis["ids"]
        assert len(result.output_ids[k]) == hypothesis["sequence_length"]
        assert result.cum_log_probs[k] == pytest.approx(
            hypothesis["cum_log_prob"], abs=LOG_PROB_TOLERANCE
        )
        assert sum(result.output_log_probs[k]) == pytest.approx(
            hypothesis["cum_log_prob"], abs=LOG_PROB_TOLERANCE
        )


@pytest.mark.parametrize("case", cases("gpt_output_layout"))
def test_output_layout_of_padded_batches(case):
    columns = {
        "input_ids": case["input_ids"],
        "input_lengths": [[n] for n in case["input_lengths"]],
        "request_output_len": [[n] for n in case["request_output_len"]],
    }
    request = parse_request(
        {name: np.asarray(values, np.uint32) for name, values in columns.items()},
        ModelLimits(vocab_size=1000, start_id=case["end_id"], end_id=case["end_id"]),
    )
    results = [SequenceResult((tuple(ids),), (0.0,), (), ("length",)) for ids in case["generated"]]
    outputs = assemble_outputs(request, results)
    assert outputs["output_ids"][:, 0].tolist() == case["output_ids"]
    assert outputs["sequence_length"][:, 0].tolist() == case["sequence_length"]
    assert outputs["response_input_lengths"][:, 0].tolist() == case["response_input_lengths"]
