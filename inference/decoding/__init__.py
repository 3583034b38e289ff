"""Logits to tokens: requests, processors, sampling and beam search; no model, ranks or Triton."""
