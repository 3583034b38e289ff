"""Suggestions for mistyped names: the most similar known name."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_LIKE = 0.75  # from which on a name is taken for another, mistyped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the closest known name, or an empty text."""
    near = closest(name, known)
    return f" (did you mean {near}?)" if near else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`.

    Case does not count. Of names with dots or slashes the last part counts too: the right key in
    the wrong group is a close match.
    """
    likeness, near = max(((_likeness(name, each), each) for each in known), default=((0.0,), None))
    return near if likeness[0] >= _LIKE else None


def _likeness(name: str, known: str) -> tuple[float, ...]:
    """Return how alike two names are: the whole, or their last parts; among equals the whole."""
    pairs = [(name.lower(), known.lower())]
    pairs.append((re.split("[./]", pairs[0][0])[-1], re.split("[./]", pairs[0][1])[-1]))
    whole, last = (
        1.0 if sorted(one) == sorted(other) else SequenceMatcher(None, one, other).ratio()
        for one, other in pairs
    )
    return max(whole, last), whole
