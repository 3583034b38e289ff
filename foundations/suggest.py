"""Names: the most similar known one of a mistyped name, and shell patterns."""

import fnmatch
import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_MIN_SIMILARITY = 0.75  # a name at least this similar to a known one is taken for a typing error


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the closest known name, or an empty text."""
    near = closest(name, known)
    return f" (did you mean {near}?)" if near else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, None if none is similar.

    Case is ignored. Where names have dots or slashes, their last parts are compared, too: the
    right key in the wrong group is a close match.
    """
    ranked = ((_similarity(name, candidate), candidate) for candidate in known)
    similarity, near = max(ranked, default=((0.0,), None))
    return near if similarity[0] >= _MIN_SIMILARITY else None


def _similarity(name: str, known: str) -> tuple[float, ...]:
    """Return the similarity of two names (whole or last parts), and of the whole to break ties."""
    pairs = [(name.lower(), known.lower())]
    pairs.append((re.split("[./]", pairs[0][0])[-1], re.split("[./]", pairs[0][1])[-1]))
    whole, last = (
        1.0 if sorted(one) == sorted(other) else SequenceMatcher(None, one, other).ratio()
        for one, other in pairs
    )
    return max(whole, last), whole
