"""The source checkpoint in its own library, as the reference of a served model.

Tasks ask it through the same protocol as the served model, so both are scored by the same code.
Computed one request at a time, in the type of evaluate.reference_data_type, on the first CUDA
device if there is one. Virtual tokens, the first of a prompt, take their embeddings from the
request's table or from one of the served folder, as the server does.
"""

# Shapes: N tokens, P virtual ones, E hidden, V vocabulary

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from export_scripts.ft.reader import FTReader
from export_scripts.numeric.dtypes import torch_dtype
from inference.certify.activations import NoLibraryError
from inference.certify.huggingface import import_transformers, load_transformers_model
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import (
    Completion,
    EvaluationError,
    RequestTensors,
    TextGenerator,
    added_text,
)
from inference.evaluation.tasks.served_folder import served_prompts


@dataclass(frozen=True)
class HuggingFaceModel(TextGenerator):
    """Meets TextGenerator with a model and a tokenizer of the transformers library.

    `prompts_dir` is the served folder, for the prompt tables in it.
    """

    model: Any
    tokenizer: Any
    source: str
    prompts_dir: Path | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`, without special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, up to the end token."""
        return self.decode(self._until_end(ids))

    def _until_end(self, ids: Sequence[int]) -> tuple[int, ...]:
        end = self.model.config.eos_token_id
        ends = end if isinstance(end, list) else [end]  # Llama 3 has several
        return tuple(itertools.takewhile(lambda each: each not in ends, ids))

    def complete_text(
        self, prompt: str, *, output_len: int, score_prompt: bool = False
    ) -> Completion:
        """Return the greedy continuation of a text."""
        ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=self._is_encoder_decoder))
        answer = self.complete_ids(ids, output_len=output_len)
        before = () if self._is_encoder_decoder else ids
        text = added_text(self.decode, before, self._until_end(answer))
        log_prob = self.context_log_prob(ids) if score_prompt else None
        return Completion(text, len(answer), log_prob)

    def complete_ids(
        self, input_ids: Sequence[int], *, output_len: int, tensors: RequestTensors | None = None
    ) -> tuple[int, ...]:
        """Return the greedy tokens after `input_ids`.

        Raises:
            EvaluationError: tensors of the serving contract were given that mean nothing here.
        """
        table = self._table(tensors) if tensors else None  # (P, E)
        virtual = 0 if table is None else len(table)
        ids = torch.tensor([list(input_ids)[virtual:]], device=self.model.device)
        prompt = {"input_ids": ids}
        with self.lock, torch.no_grad():
            if table is not None:
                embedded = self.model.get_input_embeddings()(ids)  # (1, N, E)
                prompt = {"inputs_embeds": torch.cat([table.to(embedded)[None], embedded], dim=1)}
            found = self.model.generate(
                **prompt,
                attention_mask=torch.ones(1, len(input_ids), device=ids.device, dtype=torch.long),
                generation_config=self._greedy(output_len),
            )
        # Of embeddings a decoder returns its answer alone.
        start = 1 if self._is_encoder_decoder else 0 if virtual else len(input_ids)
        return tuple(int(each) for each in found[0, start:])

    def _table(self, tensors: RequestTensors) -> Any:
        """Return the embeddings (P, E) of the virtual tokens that a request asks for."""
        if "request_prompt_embedding" in tensors:
            return torch.tensor(tensors["request_prompt_embedding"])
        number = tensors.get("prompt_learning_task_name_ids")
        names = {each.task_id: name for name, each in served_prompts(self.prompts_dir).items()}
        if self.prompts_dir is None or number not in names:
            raise EvaluationError(
                f"evaluate.reference=huggingface cannot answer requests with {', '.join(tensors)}: "
                "the served folder lists no such prompt table; set evaluate.reference=none."
            )
        return FTReader(self.prompts_dir).read(f"model.prompt_table.{names[number]}.weight")

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        """Return the natural log probability of `input_ids`, the first token given."""
        ids = torch.tensor([list(input_ids)], device=self.model.device)
        with self.lock, torch.no_grad():
            logits = self.model(ids).logits[0, :-1].float()  # (S - 1, V)
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])  # (S - 1, 1)
        return float(chosen.sum())

    def _greedy(self, output_len: int) -> Any:
        """Return the plainest decoding, whatever the checkpoint suggests for itself."""
        from transformers import GenerationConfig

        config = self.model.config
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=output_len,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id if config.pad_token_id is not None else 0,
            decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        )


def load_reference_model(options: EvaluationOptions) -> HuggingFaceModel:
    """Load the source checkpoint, tokenizer included.

    Raises:
        EvaluationError: transformers is not installed, or cannot read the folder as a whole.
    """
    checkpoint, data_type = options.source_path, options.reference_data_type
    assert checkpoint is not None, "checked before"
    try:
        transformers = import_transformers()
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        kind = (
            transformers.AutoModelForSeq2SeqLM
            if config.is_encoder_decoder
            else transformers.AutoModelForCausalLM
        )
        model = load_transformers_model(kind, checkpoint, dtype=torch_dtype(data_type))
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, NoLibraryError) as error:
        raise EvaluationError(
            f"evaluate.reference=huggingface: {error}\nIt needs transformers, and the source "
            "checkpoint with its tokenizer; set evaluate.reference=none without them."
        ) from error
    if torch.cuda.is_available():
        model = model.to("cuda")
    source = f"transformers {transformers.__version__} in {data_type} on {checkpoint}"
    return HuggingFaceModel(model, tokenizer, source, options.weights_dir)
