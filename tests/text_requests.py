"""Requests to a text service, without the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.backend.text_generation import TextService


def infer(service: TextService, requests: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the outputs of requests that run together."""
    begun = [service.begin(request) for request in requests]
    return [service.answer(rows) for rows in begun]
