"""Requests of every kind at once, in a cache that is far too small: each is answered as if alone.

Rows are preempted in the middle of prompts and answers, share the beginnings of prompts, belong to
conversations, and lose their clients. Every answer is compared, with all that it scores, with
`transformers` on the same weights and the rules of `tests.reference_decoding`.
"""

# Shapes: T tokens, V vocabulary, E hidden

import functools
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tests.reference_choice  # noqa: F401 - ranks choose on CPUs, too
from export_scripts.conversion.convert import ConversionRequest, convert
from inference.decoding.outputs import assemble_outputs
from inference.decoding.request import parse_request
from inference.decoding.rows import SessionTurn
from inference.engine.encoder_engine import EncoderEngine
from inference.engine.encoding import parse_encoding
from inference.engine.engine import Engine
from inference.engine.errors import EngineBusyError
from inference.engine.options import EngineOptions
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import GenerationStep
from inference.ranks.settings import Placement
from tests.contract import tensors_of
from tests.engine_logits import prompt_logits
from tests.reference_decoding import (
    CLOSE,
    Array,
    Rules,
    TooCloseError,
    check_sampled,
    log_softmax,
    search,
)
from tests.tiny_transformers import MODELS, write_model

logger = logging.getLogger(__name__)

REQUESTS = 24  # of a run of `make test`, for each model
CONVERSATIONS, TURNS = 2, 4
SESSION_LEN = 40
SLOTS = 7
BLOCK_TOKENS = 4
WAIT_S = 120
POSITIONS = 64
LONGEST_PROMPT, LONGEST_ANSWER = 32, 24
PREEMPTED_SHARE = 0.1  # of the steps in which no other step is under way
# Relative to a sum of some dozen hidden states, in fp32.
POOLED_TOLERANCE = 1e-3
# Relative to the largest value: BERT's gelu is the tanh form here, as in FasterTransformer.
GELU_TOLERANCE = 5e-3

# Positions that are learned, biases of scores, or rotated; factors of long sequences; windows; an
# encoder. The others, which differ from these within a layer alone, are for `make soak`.
FEW = ("gpt2", "bloom", "llama", "gemma3", "t5")
OTHERS = (
    "opt", "gptneox-parallel", "gptneox-sequential", "mistral", "qwen2", "granite", "smollm3",
    "gemma2", "mt5", "gptj", "phi3",
)  # fmt: skip
# Sees only the newest tokens by a mask that its forward pass takes as it is.
FORGETS = "llama"


@dataclass
class Row:
    """One row of a request: what is sent, by the names of the contract, and what it means."""

    ids: list[int]
    rules: Rules
    embedding: Array | None = None  # (tokens, E) of a soft prompt
    log_probs: bool = False
    context_log_probs: bool = False
    context_embeddings: bool = False
    num_log_probs: int = 0
    num_prompt_log_probs: int = 0
    memory_len: int | None = None
    session_len: int | None = None
    encoder_ids: list[int] | None = None  # what an encoder reads; `ids` is then its start id


class Oracle:
    """The model in transformers, one whole sequence at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._last: list[torch.Tensor] = []
        # Granite multiplies what it is given in place of tokens, too; the engine's first layer
        # reads that as it is.
        self._scale = getattr(model.config, "embedding_multiplier", 1.0)
        # LongRoPE has other factors for longer sequences.
        self._short = getattr(model.config, "original_max_position_embeddings", None)
        if not model.config.is_encoder_decoder:
            base = model.base_model
            base = getattr(base, "decoder", base)
            names = ("ln_f", "norm", "final_layer_norm")
            self._norm = next(
                (norm for name in names if (norm := getattr(base, name, None)) is not None), None
            )
            if self._norm is not None:
                self._norm.register_forward_pre_hook(self._note)

    def _note(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._last = [inputs[0]]

    @torch.no_grad()
    def logits(self, row: Row, answers: Sequence[Sequence[int]]) -> Array:
        """Return (answers, T, V) after every token of the context and of answers of one length."""
        if row.encoder_ids is not None:
            ids = torch.tensor([[*row.ids, *answer] for answer in answers])
            encoder_ids = torch.tensor([row.encoder_ids] * len(answers))
            return np.asarray(self.model(input_ids=encoder_ids, decoder_input_ids=ids).logits)
        if self._short is None:
            return self._forward(row, answers)
        before = row.rules.virtual + len(row.ids)
        if row.session_len is not None:  # keys that stay are rotated for the longest sequence
            return self._forward(row, answers, length=row.session_len)
        if row.rules.beam_width > 1:
            return self._forward(row, answers, length=before + row.rules.output_len - 1)
        found = self._forward(row, answers)
        if before <= self._short < found.shape[1]:
            shorter = [answer[: self._short - before] for answer in answers]
            found[:, : self._short] = self._forward(row, shorter)
        return found

    def _forward(self, row: Row, answers: Sequence[Sequence[int]], *, length: int = 0) -> Array:
        """Return the logits with the factors of sequences of at least `length` tokens."""
        count = len(row.ids) + len(answers[0])
        unseen = [0] * (length - row.rules.virtual - count)
        ids = torch.tensor([[*row.ids, *answer, *unseen] for answer in answers])
        inputs: dict[str, Any] = {"input_ids": ids}
        if row.embedding is not None:
            table = self.model.get_input_embeddings()
            virtual = torch.from_numpy(row.embedding / self._scale).expand(len(answers), -1, -1)
            inputs = {"inputs_embeds": torch.cat((virtual, table(ids)), 1)}
        if row.memory_len is not None:
            places = torch.arange(ids.shape[1])
            distance = places[:, None] - places
            hidden = (distance < 0) | (distance >= row.memory_len)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
            inputs["attention_mask"] = mask.expand(len(answers), 1, *mask.shape)
        return np.array(self.model(**inputs).logits[:, : row.rules.virtual + count])

    def embedding_sum(self, row: Row) -> Array | None:
        """Return the sum of the prompt's last hidden states, before the final norm, (E,)."""
        count = self.logits(row, [[]]).shape[1]
        return None if self._norm is None else np.asarray(self._last[0][0, :count].double().sum(0))


@dataclass
class Tally:
    """The counts of a run, and its wrong answers."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Preemptions(logging.Handler):
    """Counts preempted rows."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "preempted" in record.getMessage()


@functools.cache
def folder_of(name: str, root: Path) -> tuple[Path, Any]:
    """Return the FT folder of a model and the model itself."""
    class_name, settings = MODELS[name]
    longer = {
        key: POSITIONS for key in ("n_positions", "max_position_embeddings") if key in settings
    }
    source = write_model(name, root / name, **longer)
    ft_dir = convert(
        ConversionRequest(
            checkpoint_path=source,
            output_dir=root / f"{name}-ft",
            tp_size=1,
            weight_data_type="fp32",
        )
    ).ft_dir
    kind = getattr(transformers, class_name)
    return ft_dir, kind.from_pretrained(source, attn_implementation="eager").eval()


class Run:
    """Random requests to one model."""

    def __init__(self, engine: Engine, oracle: Oracle, name: str, seed: int) -> None:
        self.engine, self.oracle, self.name = engine, oracle, name
        self.chance = random.Random(f"{name} {seed}")
        self.vocab_size = engine.limits.vocab_size
        self.is_t5 = engine.limits.encoder_decoder
        self.headers = [self.tokens(16) for _ in range(3)]
        self.takes_embeddings = (
            not self.is_t5
            and oracle.model.get_input_embeddings().embedding_dim == engine.limits.hidden_units
        )
        self.tally = Tally()
        self.answered: list[tuple[Sequence[Row], Any, Any]] = []
        self.probed: list[tuple[list[int], Array]] = []

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(self.vocab_size) for _ in range(count)]

    def row(self, beam_width: int, **fixed: Any) -> Row:
        draw = self.chance
        ids = self.tokens(draw.randint(1, 16))
        if draw.random() < 0.5:
            ids = draw.choice(self.headers)[: draw.randint(1, 16)] + ids
        elif draw.random() < 0.3:
            ids += self.tokens(LONGEST_PROMPT - len(ids))
        end_id = draw.randrange(self.vocab_size)
        rules = Rules(
            draw.choice((1, 9, LONGEST_ANSWER, LONGEST_ANSWER)), end_id, beam_width=beam_width
        )
        rules = replace(rules, **self.options(beam_width))
        row = Row(ids, rules)
        if draw.random() < 0.5:
            row.log_probs = True
        if not self.is_t5:
            row.context_log_probs = draw.random() < 0.4
            row.context_embeddings = draw.random() < 0.3
            if beam_width == 1:
                row.num_log_probs = draw.choice((0, 0, 1, 3))
                row.num_prompt_log_probs = draw.choice((0, 0, 2))
        for name, value in fixed.items():
            setattr(row, name, value)
        if self.is_t5:
            row.encoder_ids, row.ids = row.ids, [self.engine.limits.start_id]
        return row

    def options(self, beam_width: int) -> dict[str, Any]:
        draw = self.chance
        chosen: dict[str, Any] = {}
        if beam_width == 1 and draw.random() < 0.7:
            chosen["random_seed"] = draw.randrange(2**40)
            if draw.random() < 0.5:
                chosen["runtime_top_k"] = draw.randint(2, 30)
            else:
                chosen["top_p_decay"] = draw.choice((1.0, 0.9))
                chosen["top_p_min"] = draw.choice((1e-6, 0.2))
            if "top_p_decay" in chosen or draw.random() < 0.5:
                chosen["runtime_top_p"] = draw.choice((0.3, 0.8, 1.0))
        chosen["temperature"] = draw.choice((1.0,) * 5 + (0.6, 1.7))
        if draw.random() < 0.3:
            chosen["repetition_penalty"] = draw.choice((0.8, 1.4))
        elif draw.random() < 0.2:
            chosen["presence_penalty"] = 0.7
        chosen["frequency_penalty"] = draw.choice((0.0, 0.0, 0.0, 0.6, 1.5, -0.4))
        if draw.random() < 0.25:
            ids = self.tokens(draw.randint(1, 5))
            chosen["logit_bias"] = {token: draw.uniform(-6, 6) for token in ids}
        if draw.random() < 0.3:
            chosen["min_length"] = draw.randint(1, 6)
        if draw.random() < 0.3:
            chosen["bad_words"] = [self.tokens(draw.randint(1, 2)) for _ in range(6)]
        if draw.random() < 0.15:
            chosen["stop_words"] = [self.tokens(1) for _ in range(3)]
        if beam_width > 1:
            chosen["len_penalty"] = draw.choice((0.0, 0.0, 1.0))
        return chosen

    def rows(self) -> list[Row]:
        draw = self.chance
        beam_width = draw.choice((1, 1, 1, 1, 1, 1, 1, 2, 3))
        rows = [self.row(beam_width) for _ in range(draw.randint(1, 3))]
        if self.takes_embeddings and draw.random() < 0.2:
            hidden = self.engine.limits.hidden_units
            for row in rows:
                generator = np.random.default_rng(draw.randrange(2**32))
                length = draw.randint(1, 6)
                row.embedding = generator.normal(0, 0.3, (length, hidden)).astype(np.float32)
                row.rules.virtual = length
                row.num_prompt_log_probs = 0
                row.ids = [*self.tokens(2), *row.ids]
        return rows

    def request(self, rows: Sequence[Row], **session: int) -> Any:
        """Return the request of rows, through the contract's tensors."""
        return parse_request(inputs_of(rows, **session), self.engine.limits)

    def check_all(self) -> None:
        """Compare all that was answered with the oracle."""
        for answered in self.answered:
            self.check(*answered)
        for prompt, found in self.probed:
            expected = self.oracle.logits(Row(prompt, Rules(1, 0)), [[]])[0, :, : self.vocab_size]
            self.tally.counts["probes"] += 1
            if found.shape != expected.shape or np.abs(found - expected).max() > CLOSE:
                self.tally.wrong.append(
                    f"{self.name}: logits {found.shape} of {len(prompt)} tokens"
                )

    def check(self, rows: Sequence[Row], request: Any, result: Any) -> None:
        """Compare a request's outputs with the oracle's."""
        outputs = assemble_outputs(request, result.rows)
        for b, row in enumerate(rows):
            self.tally.counts["rows"] += 1
            try:
                if row.rules.beam_width == 1:
                    self._check_sampled(row, b, outputs, result.rows[b])
                else:
                    self._check_beams(row, b, outputs, result.rows[b])
                self._check_context_embedding(row, b, outputs)
            except AssertionError as error:
                text = str(error).split("\n")[0]
                self.tally.wrong.append(f"{self.name}: {text} in row {b} of {row}")

    def _check_sampled(self, row: Row, b: int, outputs: Mapping[str, Array], result: Any) -> None:
        (answer,) = result.output_ids
        assert_answer(outputs, b, row, [answer], self.is_t5)
        logits = self.oracle.logits(row, [answer])[0, :, : self.vocab_size]
        first = row.rules.virtual + len(row.ids) - 1
        scores = check_sampled(answer, logits[first:-1], row.ids, row.rules)
        raw = log_softmax(logits)
        before = len(logits) - len(row.ids) - len(answer)  # virtual tokens
        context = sum(float(raw[before + n, t]) for n, t in enumerate(row.ids[1:]))
        if before:
            context += float(raw[before - 1, row.ids[0]])
        if row.log_probs:
            cum = scores.cum + (context if row.context_log_probs else 0.0)
            self.close("cum_log_probs", outputs["cum_log_probs"][b, 0], cum, len(logits))
            for n, value in enumerate(scores.each):
                self.close("output_log_probs", outputs["output_log_probs"][b, 0, n], value)
        places = [*row.ids, *answer]
        answer_at, shift = len(row.ids), before
        scored = set(range(1, answer_at) if row.num_prompt_log_probs else ())
        scored |= set(range(answer_at, len(places)) if row.num_log_probs else ())
        if "token_log_probs" not in outputs:
            assert not scored, "token_log_probs are missing"
            return
        for place in range(outputs["token_log_probs"].shape[2]):
            found = outputs["token_log_probs"][b, 0, place]
            if place not in scored:
                assert found == 0, f"token_log_probs: {found} at place {place}"
                continue
            line = raw[shift + place - 1]
            self.close(f"token_log_probs[{place}]", found, line[places[place]])
            count = row.num_prompt_log_probs if place < answer_at else row.num_log_probs
            best = -np.sort(-line)[:count]
            ids = outputs["top_token_ids"][b, 0, place, :count]
            values = outputs["top_token_log_probs"][b, 0, place, :count]
            for token, value, expected in zip(ids, values, best, strict=True):
                self.close(f"top_token_log_probs[{place}]", value, expected)
                self.close(f"top_token_ids[{place}]", line[token], expected)

    def _check_beams(self, row: Row, b: int, outputs: Mapping[str, Array], result: Any) -> None:
        answers = result.output_ids
        assert_answer(outputs, b, row, answers, self.is_t5)

        def next_logits(tokens: list[list[int]]) -> Array:
            return self.oracle.logits(row, tokens)[:, -1, : self.vocab_size]

        try:
            beams = search(next_logits, row.ids, row.rules, pooled=self.is_t5)
        except TooCloseError:
            self.tally.counts["searches too close to tell"] += 1
            return
        self.tally.counts["searches"] += 1
        expected = [tuple(beam.tokens) for beam in beams]
        assert list(answers) == expected, f"beams: {answers}, not {expected}"
        if not row.log_probs:
            return
        context = 0.0
        if row.context_log_probs:
            raw = log_softmax(self.oracle.logits(row, [[]])[0, :, : self.vocab_size])
            before = row.rules.virtual
            context = sum(float(raw[before + n, t]) for n, t in enumerate(row.ids[1:]))
            context += float(raw[before - 1, row.ids[0]]) if before else 0.0
        for k, beam in enumerate(beams):
            self.close("cum_log_probs", outputs["cum_log_probs"][b, k], beam.cum + context, 40)
            for n, value in enumerate(beam.each):
                self.close("output_log_probs", outputs["output_log_probs"][b, k, n], value)

    def _check_context_embedding(self, row: Row, b: int, outputs: Mapping[str, Array]) -> None:
        if not row.context_embeddings:
            return
        self.tally.counts["context embeddings"] += 1
        assert "context_embeddings" in outputs, "context_embeddings are missing"
        expected = self.oracle.embedding_sum(row)
        if expected is None:
            return
        for found in outputs["context_embeddings"][b]:
            difference = np.abs(found - expected).max() / np.abs(expected).max()
            assert difference < POOLED_TOLERANCE, f"context_embeddings: off by {difference:.2g}"

    def close(self, name: str, found: float, expected: float, terms: int = 1) -> None:
        self.tally.counts["scores"] += 1
        if not expected > -1e30:
            return  # what a rule forbids has no score
        assert abs(found - expected) < CLOSE * terms**0.5, f"{name}: {found}, not {expected}"


def assert_answer(
    outputs: Mapping[str, Array],
    b: int,
    row: Row,
    answers: Sequence[Sequence[int]],
    is_t5: bool,
) -> None:
    """Check that the tensors hold a row's context and its answers."""
    context = [] if is_t5 else row.ids
    for k, answer in enumerate(answers):
        shown = [*context, *answer]
        assert outputs["output_ids"][b, k, : len(shown)].tolist() == shown, "output_ids"
        padded = 0 if is_t5 else outputs["output_ids"].shape[2]
        assert outputs["sequence_length"][b, k] >= min(len(shown), padded or len(shown))


def inputs_of(rows: Sequence[Row], **session: int) -> dict[str, Array]:
    is_t5 = rows[0].encoder_ids is not None
    prompts = [row.ids if row.encoder_ids is None else row.encoder_ids for row in rows]
    columns: dict[str, Any] = {"is_return_log_probs": [row.log_probs for row in rows], **session}
    names = ["end_id", "beam_width", "runtime_top_k", "runtime_top_p", "temperature", "min_length"]
    names += ("len_penalty", "top_p_decay", "top_p_min", "random_seed", "frequency_penalty")
    columns |= {name: [getattr(row.rules, name) for row in rows] for name in names}
    for name, nothing in (("repetition_penalty", 1.0), ("presence_penalty", 0.0)):
        values = [getattr(row.rules, name) for row in rows]
        other = "presence_penalty" if name == "repetition_penalty" else "repetition_penalty"
        if any(value != nothing for value in values) and other not in columns:
            columns[name] = values
        else:  # a request has one kind of penalty
            for row in rows:
                setattr(row.rules, name, nothing)
    if not is_t5:
        columns |= {
            "is_return_context_cum_log_probs": [row.context_log_probs for row in rows],
            "is_return_context_embeddings": [row.context_embeddings for row in rows],
            "num_log_probs": [row.num_log_probs for row in rows],
            "num_prompt_log_probs": [row.num_prompt_log_probs for row in rows],
        }
    output_len = [row.rules.output_len for row in rows]
    tensors = tensors_of(prompts, output_len, model="T5" if is_t5 else "GPT", **columns)
    for name, lists in (
        ("bad_words_list", [row.rules.bad_words for row in rows]),
        ("stop_words_list", [row.rules.stop_words for row in rows]),
    ):
        if any(lists):
            tensors[name] = np.stack([word_list(words) for words in lists])
    tensors |= biases([row.rules.logit_bias for row in rows])
    if rows[0].embedding is not None:
        sizes = [len(row.embedding) for row in rows if row.embedding is not None]
        table = np.zeros((len(rows), max(sizes), rows[0].embedding.shape[1]), np.float32)
        for b, row in enumerate(rows):
            assert row.embedding is not None
            table[b, : len(row.embedding)] = row.embedding
        tensors["request_prompt_embedding"] = table
        tensors["request_prompt_lengths"] = np.array(sizes, np.uint32)[:, None]
        tensors["request_prompt_type"] = np.ones((len(rows), 1), np.uint32)
    return tensors


def biases(rows: Sequence[Mapping[int, float]]) -> dict[str, Array]:
    """Return the tensors of biases, padded to the longest row."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), -1, np.int32)
    values = np.ones((len(rows), width), np.float32)
    for b, row in enumerate(rows):
        ids[b, : len(row)], values[b, : len(row)] = list(row), list(row.values())
    return {"logit_bias_ids": ids, "logit_bias": values} if width else {}


def word_list(words: Sequence[Sequence[int]], width: int = 16) -> Array:
    """Return the (2, width) form of words: their ids, and where each of them ends."""
    lines = np.full((2, width), -1, np.int32)
    ids = list(itertools.chain.from_iterable(words))
    lines[0, : len(ids)] = ids
    lines[1, : len(words)] = list(itertools.accumulate(map(len, words)))
    return lines


def send_storm(run: Run, count: int) -> None:
    """Send requests all at once; cancel some of them, check the others."""
    sent: list[tuple[list[Row], Any, Future[Any], list[GenerationStep]]] = []
    for _ in range(count):
        rows = run.rows()
        request, frames = run.request(rows), list[GenerationStep]()
        streams = run.chance.random() < 0.2
        future = run.engine.submit(request, on_step=frames.append if streams else None)
        sent.append((rows, request, future, frames))
        if run.chance.random() < 0.2:
            run.chance.choice(sent)[2].cancel()
    for rows, request, future, frames in sent:
        try:
            result = future.result(WAIT_S)
        except (CancelledError, EngineBusyError) as error:
            run.tally.counts[type(error).__name__] += 1
            continue
        except Exception as error:
            run.tally.wrong.append(f"{run.name}: {error!r} for {rows}")
            continue
        run.answered.append((rows, request, result))
        check_frames(run, frames, result)


def check_frames(run: Run, frames: Sequence[GenerationStep], result: Any) -> None:
    """Frames hold beginnings of the answer, and what they say of the prompt is final."""
    run.tally.counts["frames"] += len(frames)
    for frame in frames:
        for b, row in enumerate(frame.rows):
            whole = result.rows[b]
            if row is None:
                continue
            pooled, final = row.prompt.embedding, whole.prompt.embedding
            if pooled is not None and not np.array_equal(pooled, final):
                run.tally.wrong.append(f"{run.name}: partial context_embeddings in a frame")
            if len(whole.output_ids) > 1:
                continue
            if whole.output_ids[0][: len(row.output_ids[0])] != row.output_ids[0]:
                run.tally.wrong.append(f"{run.name}: a frame that is not a prefix of the answer")
            if row.prompt.scores != whole.prompt.scores:
                run.tally.wrong.append(f"{run.name}: a frame with some of the prompt's scores")


def converse(run: Run, number: int) -> None:
    """Hold conversations next to other requests; each turn answers as the whole of it would."""
    draw = random.Random(f"{run.name} {number} {run.chance.random()}")
    beam_width = draw.choice((1, 1, 1, 2))
    memory_len = draw.choice((None, 20)) if run.name == FORGETS and beam_width == 1 else None
    histories: list[list[int]] = []
    for nth in range(TURNS):
        fixed = {"memory_len": memory_len}
        fresh = [
            run.row(beam_width, **fixed)
            for _ in histories or range(1 if beam_width > 1 else draw.randint(1, 2))
        ]
        for row in fresh:
            row.ids = row.ids[: draw.choice((1, 1, 5, 18))]
            row.session_len = SESSION_LEN
            row.rules.output_len = min(row.rules.output_len, 4)
            if nth:
                row.context_log_probs = row.context_embeddings = False  # refused
                row.num_prompt_log_probs = 0
        histories = histories or [[] for _ in fresh]
        room = min(SESSION_LEN - len(history) - 4 for history in histories)
        if room < 1:
            break
        for row in fresh:
            row.ids = row.ids[:room]
        session: dict[str, int] = {} if nth else {"session_len": SESSION_LEN}
        if memory_len is not None and not nth:
            session["memory_len"] = memory_len
        request = run.request(fresh, **session)
        turn = SessionTurn(number, starts=not nth, ends=nth == TURNS - 1)
        try:
            result = run.engine.submit(request, turn=turn).result(WAIT_S)
        except EngineBusyError:  # another one holds the slots
            assert not nth
            run.tally.counts["busy"] += 1
            return
        for row, history in zip(fresh, histories, strict=True):
            row.ids = history + row.ids
        run.answered.append((fresh, result.request, result))
        run.tally.counts["turns"] += 1
        for b, (row, answer) in enumerate(zip(fresh, result.rows, strict=True)):
            kept = answer.output_ids[0]
            if answer.finish_reasons[0] != "length":
                kept = kept[:-1]
            histories[b] = [*row.ids, *kept]
    else:
        return
    run.engine.end_refused(SessionTurn(number, ends=True))


def probe(run: Run, prompt: list[int]) -> None:
    """Compare all logits of a prompt."""
    try:
        found = np.asarray(prompt_logits(run.engine, prompt))
    except EngineBusyError:
        return
    run.probed.append((prompt, found))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random_requests")


@pytest.fixture
def preemptions() -> Iterator[Preemptions]:
    """Yields the count of preempted rows."""
    handler, engine_logger = Preemptions(), logging.getLogger("inference.engine")
    level = engine_logger.level
    engine_logger.addHandler(handler)
    engine_logger.setLevel(logging.DEBUG)
    yield handler
    engine_logger.removeHandler(handler)
    engine_logger.setLevel(level)


def preempt_at_random(scheduler: Any, chance: random.Random) -> None:
    """Let rows be preempted at any moment, also where their blocks would have sufficed."""
    extend_or_preempt = scheduler._extend_or_preempt

    def preempt_more(rows: list[Any], *, under_way: bool) -> bool:
        movable = [row for row in rows if not row.owner.turn and len(row.slots) == 1]
        if movable and not under_way and chance.random() < PREEMPTED_SHARE:
            row = chance.choice(movable)
            scheduler._preempt(row)
            rows.remove(row)
        return bool(extend_or_preempt(rows, under_way=under_way))

    scheduler._extend_or_preempt = preempt_more


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)]
)
def test_every_answer_is_that_of_the_model_alone(name, root, preemptions, soak):
    ft_dir, model = folder_of(name, root)
    token_bytes = 4 * 2 * heads_of(model.config)
    parts = 2 if model.config.is_encoder_decoder else 1
    options = EngineOptions(
        max_lanes=SLOTS,
        max_seq_len=POSITIONS,
        kv_block_tokens=BLOCK_TOKENS,
        # Room for two or three sequences of the length that most have, and the sessions.
        kv_cache_bytes=token_bytes * (parts * POSITIONS + 24 // parts**2 * BLOCK_TOKENS),
        max_stall_s=1e-6,  # the least chunks
        threads=1,
    )
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        scheduler = engine.scheduler
        assert isinstance(scheduler, Scheduler)
        preempt_at_random(scheduler, random.Random(name))
        oracle = Oracle(model)
        total = Tally()
        for seed in range(soak):
            scheduler._ranks_choose = (len(name) + seed) % 2 == 0
            run = Run(engine, oracle, f"{name}", seed)
            with ThreadPoolExecutor(1) as clients:
                prompts = [run.tokens(run.chance.randint(1, LONGEST_PROMPT)) for _ in range(6)]
                talks = []
                for number, prompt in enumerate(prompts if parts == 1 else ()):
                    talks.append(clients.submit(probe, run, prompt))
                    if number < CONVERSATIONS:
                        talks.append(clients.submit(converse, run, 1 + number))
                send_storm(run, REQUESTS)
                for talk in talks:
                    talk.result(WAIT_S)
            run.check_all()
            total.counts += run.tally.counts
            total.wrong += run.tally.wrong
        settled = engine.load().running == 0 and engine.queued_rows == 0
    logger.info("%s: %s, %d preempted", name, dict(total.counts), preemptions.count)
    assert not total.wrong, f"{len(total.wrong)} wrong of {total.counts}:\n" + "\n".join(
        total.wrong[:20]
    )
    assert settled
    assert preemptions.count >= 5 * soak


def heads_of(config: Any) -> int:
    """Return the numbers of one cached token's keys."""
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "d_kv", None) or getattr(config, "head_dim", None)
    return int(layers * heads * (size or config.hidden_size // config.num_attention_heads))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert", "t5-encoder"])
def test_every_row_of_an_encoder_is_that_of_the_model_alone(name, root, soak):
    ft_dir, model = folder_of(name, root)
    chance = random.Random(name)
    placement = Placement(device="cpu")
    with EncoderEngine(ft_dir, placement, options=EngineOptions(threads=1)) as engine:
        sent = []
        for number in range(40 * soak):
            prompts = [
                [chance.randrange(41) for _ in range(chance.randint(1, 28))]
                for _ in range(chance.randint(1, 4))
            ]
            request = parse_encoding(encoder_tensors(model, name, prompts), engine.architecture)
            sent.append((prompts, engine.submit(request)))
            if number % 5 == 4:
                chance.choice(sent)[1].cancel()
        checked = 0
        for prompts, future in sent:
            try:
                found = future.result(WAIT_S).hidden
            except CancelledError:
                continue
            for b, prompt in enumerate(prompts):
                with torch.no_grad():
                    expected = model(torch.tensor([prompt])).last_hidden_state[0]
                difference = (found[b, : len(prompt)] - expected).abs().max()
                assert float(difference) < GELU_TOLERANCE * float(expected.abs().max())
                assert not found[b, len(prompt) :].any()
                checked += 1
    assert checked > 40 * soak


def encoder_tensors(model: Any, name: str, prompts: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Return a request's tensors: ids, or for BERT the hidden states that its layers read."""
    tensors = tensors_of(prompts, model="T5-Encoder")
    if name != "bert":
        return tensors
    ids = torch.from_numpy(tensors["input_ids"].astype(np.int64))
    with torch.no_grad():
        states = model.embeddings(ids).numpy()
    return {
        "input_hidden_state": states,
        "sequence_lengths": tensors["sequence_length"].astype(np.int32),
    }
