"""Suggestions for mistyped names: the most similar known name."""

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the closest known name, or an empty text."""
    near = closest(name, known)
    return f" (did you mean {near}?)" if near else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`.

    Case does not count. Of names with dots or slashes the last part counts too: the right key in
    the wrong group is a close match.
    """
    names = {each.lower(): each for each in known}
    found = _closest(name.lower(), list(names))
    return None if found is None else names[found]


def _closest(name: str, names: list[str]) -> str | None:
    if name in names:
        return name
    last = _last_part(name)
    if same_leaf := [each for each in names if _last_part(each) == last]:
        return max(same_leaf, key=lambda each: _likeness(name, each))
    if sorted(name) in (anagrams := [sorted(each) for each in names]):
        return names[anagrams.index(sorted(name))]
    if matches := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        return matches[0]
    leaves = difflib.get_close_matches(last, [_last_part(each) for each in names], n=1, cutoff=0.75)
    candidates = [each for each in names if leaves and _last_part(each) == leaves[0]]
    return max(candidates, key=lambda each: _likeness(name, each), default=None)


def _last_part(name: str) -> str:
    return re.split("[./]", name)[-1]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
