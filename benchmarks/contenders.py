"""The programs that benchmarks compare, all with the same random weights.

An engine accepts requests at any time and batches them; a generator answers batches of prompts of
equal length one after another.
"""

import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from benchmarks.models import Model, huggingface_folder
from stages.engines import VLLM_TYPES

# Called with the number of a request and its tokens so far.
OnTokens = Callable[[int, int], object]
Prompts = Sequence[Sequence[int]]
# (prompts, tokens to generate for each, callback for the tokens so far) -> seconds, if the program
# measures its own time, or else None.
Generate = Callable[[Prompts, int, Callable[[int], object]], float | None]


@dataclass(frozen=True)
class Request:
    """A prompt, and the number of tokens to generate; end tokens do not stop it."""

    prompt: list[int]
    output_len: int


def random_requests(
    count: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    vocab_size: int,
    shared_len: int = 0,
    seed: int = 7,
) -> list[Request]:
    """Return requests with random lengths in the ranges `inputs` and `outputs` (inclusive).

    All begin with the same `shared_len` tokens, in addition to those of `inputs`.
    """
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(length)]

    shared = ids(shared_len)
    return [
        Request(shared + ids(rng.randint(*inputs)), rng.randint(*outputs)) for _ in range(count)
    ]


class Engine(Protocol):
    """An engine in this process."""

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        """Send a request, which starts before the next step."""

    def wait(self) -> None:
        """Wait for the answers to all requests so far; others may be submitted meanwhile."""


class Slipway:
    """This project's engine."""

    def __init__(self, model: Model, *, top_p: float | None = None, **settings: Any) -> None:
        """Start the engine; `settings` are fields of its Placement and EngineOptions."""
        from inference.engine.engine import Engine
        from inference.engine.options import EngineOptions
        from inference.ranks.settings import Placement
        from inference.system.process_memory import keep_loaded

        names = {field.name for field in fields(EngineOptions)}
        options = EngineOptions(**{key: settings.pop(key) for key in names & settings.keys()})
        self._engine = Engine(model.ft_dir, Placement(**settings), options=options)
        self._engine.start()
        keep_loaded()
        self._top_p = top_p
        self._futures: list[Any] = []

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        """Send a request, with its number as the seed."""
        from inference.decoding.rows import GenerationRequest, SequenceRequest
        from inference.decoding.sampling_params import SamplingParams

        unused_id = self._engine.limits.vocab_size + 1
        ids = tuple(request.prompt)
        sampling: dict[str, Any] = {} if self._top_p is None else {"top_k": 0, "top_p": self._top_p}
        options = SamplingParams(end_id=unused_id, random_seed=number, **sampling)
        row = SequenceRequest(ids, request.output_len, options, context_ids=ids)
        listener = None
        if on_tokens is not None:
            count = 0

            def listener(new: Sequence[Sequence[int]]) -> None:
                nonlocal count
                count += len(new[0])
                on_tokens(number, count)

        future = self._engine.submit(
            GenerationRequest((row,), len(ids)), on_step=listener, only_tokens=True
        )
        if on_tokens is not None:
            future.add_done_callback(lambda _: on_tokens(number, request.output_len))
        self._futures.append(future)

    def wait(self) -> None:
        """Wait for the answers to all requests so far."""
        pending, self._futures = self._futures, []
        for future in pending:
            future.result()


class Vllm:
    """vLLM's engine."""

    def __init__(
        self, model: Model, *, data_type: str, top_p: float | None = None, **settings: Any
    ) -> None:
        """Start the engine; `settings` are arguments of vLLM's LLM."""
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=str(huggingface_folder(model)),
            skip_tokenizer_init=True,
            dtype=VLLM_TYPES[data_type],
            **settings,
        )
        sampling = {"temperature": 0} if top_p is None else {"top_p": top_p}
        self._params = partial(SamplingParams, ignore_eos=True, detokenize=False, **sampling)
        self._engine = llm.llm_engine
        self._arrived: SimpleQueue[tuple[int, Request, OnTokens | None]] = SimpleQueue()
        self._listeners: dict[str, tuple[int, OnTokens | None]] = {}

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        """Queue a request, which `wait` starts."""
        self._arrived.put((number, request, on_tokens))

    def wait(self) -> None:
        """Answer all requests so far."""
        while self._listeners or not self._arrived.empty():
            # A queue, and no lock around each step: the loop would take the lock again before a
            # waiting sender.
            while not self._arrived.empty():
                number, request, on_tokens = self._arrived.get()
                name = f"{number}-{time.perf_counter_ns()}"
                self._listeners[name] = (number, on_tokens)
                params = self._params(max_tokens=request.output_len)
                self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            for output in self._engine.step():
                number, listener = self._listeners[output.request_id]
                if listener is not None:
                    listener(number, len(output.outputs[0].token_ids))
                if output.finished:
                    del self._listeners[output.request_id]


def engine_generator(engine: Callable[..., Engine], model: Model, **settings: Any) -> Generate:
    """Start an engine, and return it as a generator."""
    started = engine(model, **settings)

    def generate(prompts: Prompts, tokens: int, on_token: Callable[[int], object]) -> None:
        for number, prompt in enumerate(prompts):
            listener = None if number else lambda _, count: on_token(count)
            started.submit(number, Request([*prompt], tokens), listener)
        started.wait()

    return generate


def hugging_face(model: Model, *, data_type: str, device: str) -> Generate:
    """Return transformers' generate as a generator."""
    import torch
    import transformers

    from export_scripts.numeric.dtypes import torch_dtype

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        huggingface_folder(model), dtype=torch_dtype(data_type)
    )
    loaded.to(device).eval()

    def generate(prompts: Prompts, tokens: int, on_token: Callable[[int], object]) -> None:
        ids, numbers = torch.tensor(prompts, device=device), itertools.count(1)

        def count_token(_: object, scores: object) -> object:
            on_token(next(numbers))
            return scores

        with torch.inference_mode():
            loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                logits_processor=transformers.LogitsProcessorList([count_token]),
            )

    return generate


def ctranslate(model: Model, *, data_type: str, threads: int) -> Generate:
    """Return CTranslate2's generator on CPU."""
    import ctranslate2
    import tokenizers
    import transformers

    folder, kind = huggingface_folder(model), {"fp32": "float32", "int8": "int8"}[data_type]
    # The converter needs a tokenizer's vocabulary, which random weights lack.
    words = {f"t{i}": i for i in range(model.vocab_size)}
    words["<|endoftext|>"] = words.pop("t0")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    target = folder.with_name(f"ctranslate2_{kind}")
    if not target.exists():
        converter = ctranslate2.converters.TransformersConverter(str(folder))
        converter.convert(str(target), quantization=kind)
    generator = ctranslate2.Generator(
        str(target), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1
    )

    def generate(prompts: Prompts, tokens: int, on_token: Callable[[int], object]) -> None:
        del on_token  # CTranslate2 returns all tokens at the end
        texts = [[f"t{i}" for i in ids] for ids in prompts]
        length = {"min_length": tokens, "max_length": tokens}
        generator.generate_batch(texts, **length, sampling_topk=1, include_prompt_in_result=False)

    return generate


def llama_cpp(model: Model, *, data_type: str, threads: int, program: Path) -> Generate:
    """Return a generator that runs llama.cpp's `llama-batched-bench` on CPU.

    The program chooses the prompts, and measures its time without loading the model.
    """
    kind = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "int8": "Q8_0"}[data_type]
    file = _gguf_file(model, kind)

    def generate(prompts: Prompts, tokens: int, on_token: Callable[[int], object]) -> float:
        del on_token
        batch, length = len(prompts), len(prompts[0])
        numbers = {
            "-c": batch * (length + tokens), "-b": 2048, "-t": threads,
            "-npp": length, "-ntg": tokens, "-npl": batch,
        }  # fmt: skip
        words = [str(word) for pair in numbers.items() for word in pair]
        command = [str(program), "-m", str(file), *words, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            shown = done.stderr[-2000:]
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {shown}")
        return float(json.loads(lines[-1])["t"])

    return generate


def _gguf_file(model: Model, kind: str) -> Path:
    """Write a Llama or Qwen2 with llama.cpp's package gguf, unless the file exists.

    Queries and keys are not permuted as llama.cpp expects; the time is the same.
    """
    import gguf
    from safetensors import safe_open

    folder = huggingface_folder(model)
    file = folder.with_name(f"{kind}.gguf")
    if file.exists():
        return file
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
    arch = architecture[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file.with_suffix(".part"), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                values = tensors.get_tensor(name).astype("float32")
                dtype = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
                data = gguf.quants.quantize(values, dtype)
                gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
                writer.add_tensor(gguf_name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_suffix(".part").rename(file)
