"""Comparison of the answers of NVIDIA's C++ backend and our engine, by family and kind of request.

    python -m benchmarks.peers.fastertransformer.parity --work-dir DIR [--models gpt2 t5 ...]

Needs a GPU and a tritonserver with both backends: docs/fastertransformer_backend.md says how to
build NVIDIA's. Both load the same shards, of random models. A row of the table says whether the
tokens are equal, and the largest difference of the log probabilities or hidden states.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from benchmarks.models import convert, save_random
from benchmarks.program import Cell, run
from benchmarks.served import (
    ENGINES,
    NEW_TOKENS,
    OURS,
    THEIRS,
    Answer,
    Served,
    Tensors,
    attempt,
    both,
    tensors,
)
from inference.decoding.rows import SessionTurn
from inference.server.client import TritonClient

# model, kind of request, and how it is asked
Question = tuple[str, str, Callable[[TritonClient], Answer]]
_SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
_OWN = _SIZES | {"bos_token_id": 0, "eos_token_id": 0}
_PROBS = {"is_return_log_probs": True}
_NUMBERS = ("cum_log_probs", "output_log_probs", "output_hidden_state")
# Small models with vocabularies of real size: the backend's sampling needs them.
DECODERS: dict[str, tuple[Any, Any]] = {
    # Its own end id is its last: virtual tokens begin behind it.
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**_SIZES)),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig(**_OWN, word_embed_proj_dim=512, ffn_dim=2048, max_position_embeddings=512),
    ),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**_OWN, vocab_size=32000)),
    # The backend's own epsilon, whatever the model's.
    "gptj": (hf.GPTJForCausalLM, hf.GPTJConfig(**_OWN, rotary_dim=32, layer_norm_epsilon=1e-6)),
    "gptneox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_OWN, intermediate_size=2048)),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**_SIZES, d_ff=2048)),
    "bert": (hf.BertModel, hf.BertConfig()),
}
MODELS = DECODERS | OTHERS


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield how far both engines agree about each request, and with transformers."""
    work_dir, names = args.work_dir, args.models
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 30000, length).tolist() for length in (5, 12, 9, 1)]
    with ThreadPoolExecutor() as pool:
        folders = pool.map(lambda name: shards(work_dir, name), names)
        served = models(dict(zip(names, folders, strict=True)))
    with both(work_dir, served) as clients:
        for name in names:
            if name not in DECODERS:
                continue
            expected = [transformers_answer(work_dir, name, prompt) for prompt in prompts]
            for engine, client in clients.items():
                shown = [_asking(name, tensors([prompt]))(client) for prompt in prompts]
                cells = [compared(*pair)[0] for pair in zip(expected, shown, strict=True)]
                equal = f"{cells.count('equal')} of {len(cells)} equal"
                yield f"{name}, {engine} against transformers", "tokens", equal
        for model, case, question in questions(names, prompts):
            answers = [question(clients[each]) if each in clients else "-" for each in ENGINES]
            tokens, apart = compared(*answers)
            yield f"{model}, {case}", "tokens", tokens
            yield f"{model}, {case}", "apart", apart


def shards(work_dir: Path, name: str) -> Path:
    """Return the converted folder of a random model of transformers."""
    save_random(*MODELS[name], work_dir / name)
    return convert(work_dir / name, work_dir / f"{name}_ft")


def models(folders: dict[str, Path]) -> dict[str, Served]:
    """Return the served models."""
    served = {name: Served(folder) for name, folder in folders.items()}
    served |= {
        f"{name}_fp16": Served(folders[name], "fp16") for name in DECODERS if name in folders
    }
    if gpt := folders.get("gpt2"):
        served["gpt2_stream"] = Served(gpt, more={"decoupled": True})
        served["gpt2_chat"] = Served(gpt, more={"interactive": True, "max_batch_size": 1})
        served["gpt2_int8"] = Served(gpt, "fp16", is_int8=True)
    if t5 := folders.get("t5"):
        served["t5_encoder"] = Served(t5, more={"model_type": "T5-Encoder"})
    return served


def transformers_answer(work_dir: Path, name: str, prompt: Sequence[int]) -> Tensors:
    """Return transformers' greedy answer to one prompt."""
    model = DECODERS[name][0].from_pretrained(work_dir / name).cuda().eval()
    ids = torch.tensor([prompt], device="cuda")
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return {"output_ids": model.generate(ids, **length, do_sample=False)[:, None].cpu().numpy()}


def questions(names: Sequence[str], prompts: Sequence[Sequence[int]]) -> Iterator[Question]:
    """Yield every question about the models."""
    for name in DECODERS:
        for model in (name, f"{name}_fp16") if name in names else ():
            for case, options in cases(len(prompts)).items():
                yield model, case, _asking(model, tensors(prompts, **options))
            for case in ("greedy", "top-p 0.9"):
                one_by_one = [tensors([prompt], **cases(1)[case]) for prompt in prompts]
                yield model, f"{case}, one prompt at a time", _asking(model, *one_by_one)
    if "gpt2" in names:
        first = tensors(prompts[:1])
        yield "gpt2", "stream", lambda client: attempt(lambda: frames(client, first))
        yield "gpt2", "session", lambda client: attempt(lambda: conversation(client, prompts[:3]))
        for case, inputs in gpt_cases(prompts).items():
            yield "gpt2", case, _asking("gpt2", inputs)
        yield "gpt2_int8", "greedy", _asking("gpt2_int8", tensors(prompts, **_PROBS))
    if "t5" in names:
        for case, options in cases(len(prompts), generator_only=True).items():
            yield "t5", case, _asking("t5", t5_tensors(prompts, **options))
        encoded = t5_tensors(prompts)
        del encoded["max_output_len"]
        yield "t5_encoder", "encode", _asking("t5_encoder", encoded)
    if "bert" in names:
        states = np.random.default_rng(1).normal(0, 1, (3, 16, 768)).astype(np.float32)
        inputs = {"input_hidden_state": states, "sequence_lengths": np.full((3, 1), 16, np.int32)}
        yield "bert", "encode", _asking("bert", inputs)


def _asking(model: str, *requests: Tensors) -> Callable[[TritonClient], Answer]:
    """Return a question that takes some requests; the rows of their answers follow each other."""

    def answer(client: TritonClient) -> Tensors:
        answers = [client.infer(model, inputs) for inputs in requests]
        return {name: _stacked([each[name] for each in answers]) for name in answers[0]}

    return lambda client: attempt(lambda: answer(client))


def _stacked(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the rows of all parts; shorter last dimensions are filled with zeros."""
    longest = max(part.shape[-1] for part in parts)
    return np.concatenate(
        [
            np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, longest - part.shape[-1])])
            for part in parts
        ]
    )


def cases(rows: int, *, generator_only: bool = False) -> dict[str, dict[str, Any]]:
    """Return the options of each kind of request, without those that T5 does not take."""
    # Enough words that some would be drawn.
    many = np.random.default_rng(3).permutation(30000)[:12000].tolist()
    few = {"presence_penalty": 0.8}, {"min_length": 8}
    return {
        "greedy": _PROBS,
        "top-k 4": {"runtime_top_k": 4, "random_seed": 7, **_PROBS},
        "top-p 0.9": {"runtime_top_p": 0.9, "random_seed": 7, **_PROBS},
        "top-k 8, temperature 0.7": {"runtime_top_k": 8, "temperature": 0.7, **_PROBS},
        "repetition penalty 1.5": {"repetition_penalty": 1.5, **_PROBS},
        **({} if generator_only else {"presence penalty 0.8": few[0], "minimum length 8": few[1]}),
        "bad words": {"bad_words_list": words(rows, many), **_PROBS},
        "stop words": {"stop_words_list": words(rows, many)},
        "4 beams": {"beam_width": 4, **_PROBS},
        "4 beams, diversity 0.5": {"beam_width": 4, "beam_search_diversity_rate": 0.5, **_PROBS},
        "4 beams, length penalty 1": {"beam_width": 4, "len_penalty": 1.0, **_PROBS},
        "4 beams, repetition 1.5": {"beam_width": 4, "repetition_penalty": 1.5, **_PROBS},
    }


def words(rows: int, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return words of one token each, the same for every row, (rows, 2, W)."""
    one = np.array([[tokens, range(1, len(tokens) + 1)]], np.int32)
    return one.repeat(rows, axis=0)


def gpt_cases(prompts: Sequence[Sequence[int]]) -> dict[str, Tensors]:
    """Return further requests, which a GPT alone takes."""
    sizes, virtual = DECODERS["gpt2"][1], 3
    table = np.random.default_rng(5).normal(0, 0.1, (len(prompts), virtual, sizes.n_embd))
    embedding: dict[str, Any] = {
        "request_prompt_embedding": table.astype(np.float32),
        "request_prompt_lengths": virtual,
    }
    # Ids past the vocabulary stand for rows of the table.
    tuned = [[*range(sizes.vocab_size, sizes.vocab_size + virtual), *each] for each in prompts]
    wanted = {"is_return_context_cum_log_probs": True, **_PROBS}
    return {
        "prompt's log probability": tensors(prompts, **wanted),
        "p-tuning": tensors(tuned, request_prompt_type=3, **embedding, **_PROBS),
        "soft prompt": tensors(prompts, request_prompt_type=1, **embedding, **_PROBS),
    }


def t5_tensors(prompts: Sequence[Sequence[int]], **options: Any) -> Tensors:
    """Return a T5's request."""
    names = {"input_lengths": "sequence_length", "request_output_len": "max_output_len"}
    return {names.get(key, key): value for key, value in tensors(prompts, **options).items()}


def frames(client: TritonClient, inputs: Tensors) -> Tensors:
    """Return the tokens of every frame of a stream."""
    shown = [frame["output_ids"][0, 0] for frame in client.stream("gpt2_stream", inputs)]
    return {"output_ids": np.stack(shown)}


def conversation(client: TritonClient, turns: Sequence[Sequence[int]]) -> Tensors:
    """Hold a session and return its last answer, which repeats all before."""
    answer: Tensors = {}
    for number, prompt in enumerate(turns):
        inputs = {name: value[None] for name, value in tensors([prompt], session_len=256).items()}
        turn = SessionTurn(77, starts=number == 0, ends=number == len(turns) - 1)
        answer = client.infer("gpt2_chat", inputs, turn=turn)
    return answer


def compared(theirs: Answer, ours: Answer) -> tuple[str, str]:
    """Return how many tokens are equal, and how far numbers are apart."""
    if isinstance(theirs, str):
        return f"{THEIRS}: {theirs}", "-"
    if isinstance(ours, str):
        return f"{OURS}: {ours}", "-"
    tokens = "-"
    if "output_ids" in theirs:
        left, right = theirs["output_ids"], ours["output_ids"]
        if left.shape != right.shape:
            tokens = f"shapes {left.shape} and {right.shape}"
        elif (left == right).all():
            tokens = "equal"
        else:
            rows = (left == right).all(axis=-1)
            first = (left == right).all(axis=tuple(range(left.ndim - 1))).argmin()
            tokens = f"{rows.sum()} of {rows.size} rows, first difference at {first}"
    apart = [
        f"{name} {np.abs(theirs[name].astype(float) - ours[name].astype(float)).max():.1g}"
        for name in _NUMBERS
        if name in theirs and name in ours and theirs[name].shape == ours[name].shape
    ]
    return tokens, ", ".join(apart) or "-"


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        work_dir={},
        models={"choices": MODELS, "nargs": "+", "default": list(MODELS)},
    )
