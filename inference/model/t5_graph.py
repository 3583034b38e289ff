"""A T5 decoder's stage as CUDA graphs record it."""

# Shapes: B sequences of a graph, R numbers of a sequence, E hidden, V vocabulary

from __future__ import annotations

import torch

from inference.model.attention_cuda import single_tokens
from inference.model.cached_attention import EncodedLanes
from inference.model.encoder_decoder import DecoderStep, EncoderDecoder
from inference.model.kv_cache import KVCache
from inference.model.step import AttentionRules, Step
from inference.model.token_feed import TokenFeed
from inference.parallel.layout import ParallelLayout


class EncoderDecoderGraphModel:
    """One new token of each sequence, of rows without IA3.

    The numbers of a sequence: its token, its lane, the token's place, how many tokens of the
    encoder it reads, and an id that may not be chosen.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        caches: tuple[KVCache, KVCache],
        feed: TokenFeed,
        layout: ParallelLayout,
    ) -> None:
        """Take a stage, and its caches of what was generated and of what was encoded."""
        self.layout, self.device = layout, model.device
        self._cache, self._cross_cache = caches
        self.idle: tuple[int, ...] = (0, self._cache.scratch_lane, 0, 1, -1)
        self._model = model
        self._feed = feed
        shape = self._cache.shape
        tickets = torch.zeros(
            shape.lanes * shape.kv_head_num, dtype=torch.int32, device=self.device
        )
        self._tickets = tickets

    def room(self, sequences: int) -> torch.Tensor:
        """Return an empty (sequences, E), to receive hidden states in."""
        return self._model.room(sequences)

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stage's output, see `GraphModel`."""
        ids, lanes, places, encoded, forbidden = numbers.unbind(0)
        model, tickets = self._model, self._tickets
        step = Step(
            ids=self._feed.ids(ids, lanes),
            positions=places,
            cache=self._cache,
            output_rows=torch.arange(len(ids), device=self.device),
            paged=single_tokens(lanes, places, rules=model.rules, group=1, tickets=tickets),
        )
        # As if each token were the last of the encoder's: it sees all of them.
        cross = single_tokens(lanes, encoded - 1, rules=AttentionRules(), group=1, tickets=tickets)
        inputs = DecoderStep(step, EncodedLanes(paged=cross))
        x = model.embed_step(inputs) if hidden is None else hidden
        x = model.run_decoder(x, inputs, self._cache, self._cross_cache)
        if not self.layout.is_last_stage:
            return x, None
        logits = model.logits(x)
        if self.layout.world_size > 1:
            return logits, None
        vocab_size = model.architecture.vocab_size
        return logits, self._feed.choose(logits, lanes, forbidden, vocab_size)
