"""Time limits in Slurm's notation."""

from __future__ import annotations

import re
from typing import Any

_NOTATION = "write MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, such as 2:00:00"
_CLOCK = re.compile(r"[0-9]+(:[0-9]{1,2}){0,2}")
_DAYS = re.compile(r"([0-9]+)-([0-9]{1,2}(?::[0-9]{1,2}){0,2})")
_LONGEST_MIN = 3650 * 24 * 60  # a longer limit can only be a typing error


def minutes(value: Any, *, key: str) -> int:
    """Return a time limit in minutes, rounded up.

    Raises:
        ValueError: the notation is unknown, the limit is zero or above ten years, or it is an
            integer that YAML has made of an unquoted clock time (`2:00:00` becomes 7200, which
            would mean five days).
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _whole_minutes(value, key)
    text = str(value).strip()
    if days := _DAYS.fullmatch(text):
        parts = [int(each) for each in days.group(2).split(":")]
        hour, minute, second = (*parts, 0, 0)[:3]
        seconds = ((int(days.group(1)) * 24 + hour) * 60 + minute) * 60 + second
    elif _CLOCK.fullmatch(text):
        parts = [int(each) for each in text.split(":")]
        if len(parts) == 1:
            return _whole_minutes(parts[0], key)
        hour, minute, second = (0, *parts)[-3:]
        seconds = (hour * 60 + minute) * 60 + second
    else:
        shown = "null" if value is None else text
        raise ValueError(f"{key}={shown} is not a time limit; {_NOTATION}.")
    if seconds <= 0:
        raise ValueError(f"{key}={value} leaves no time; {_NOTATION}.")
    return _bounded(-(-seconds // 60), key, value)


def slurm_notation(limit_min: int) -> str:
    """Return minutes as D-HH:MM:SS, or HH:MM:SS below a day."""
    days, rest = divmod(limit_min, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def _whole_minutes(value: int, key: str) -> int:
    if value <= 0:
        raise ValueError(f"{key}={value} leaves no time; {_NOTATION}.")
    if value >= 3600 and value % 60 == 0:
        clock = f"{value // 3600}:{value // 60 % 60:02d}:00"
        raise ValueError(
            f"{key}={value} would be {value} minutes, but looks like an unquoted {clock}, which "
            f'YAML reads in seconds; write "{clock}" in quotes, or {value // 1440}-'
            f"{value // 60 % 24:02d}:{value % 60:02d} for {value} minutes."
        )
    return _bounded(value, key, value)


def _bounded(limit_min: int, key: str, value: Any) -> int:
    if limit_min > _LONGEST_MIN:
        raise ValueError(f"{key}={value} is longer than ten years; {_NOTATION}.")
    return limit_min
