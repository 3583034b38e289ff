"""How many prompt tokens a step takes, so that running requests wait no longer than stated."""

from __future__ import annotations

_LEAST = 16  # fewer would make prompts crawl; this many may exceed the bound on slow devices
_MOST = 1024
_FIRST = 64  # before anything was measured
# With nobody decoding only cancels and other ranks' patience limit a step.
_ALONE_FACTOR = 4


class ChunkSize:
    """Keeps steps with prompt tokens near `bound_s`, by the speed measured so far."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._token_s: float | None = None

    def tokens(self, *, somebody_waits: bool) -> int:
        """Return how many prompt tokens the next step may take."""
        if self._token_s is None:
            return _FIRST if somebody_waits else _ALONE_FACTOR * _FIRST
        bound_s = self._bound_s if somebody_waits else _ALONE_FACTOR * self._bound_s
        return int(min(max(bound_s / self._token_s, _LEAST), _MOST))

    def observe(self, *, tokens: int, seconds: float) -> None:
        """Learn from a step that took so many prompt tokens and seconds."""
        if tokens < _LEAST:
            return
        token_s = seconds / tokens
        # Slower is believed at once, faster by and by.
        if self._token_s is None or token_s > self._token_s:
            self._token_s = token_s
        else:
            self._token_s = 0.7 * self._token_s + 0.3 * token_s
