"""Time limits in Slurm's notation."""

import re
from typing import Any

_NOTATION = "write MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, such as 2:00:00"
_LIMIT = re.compile(r"(?:([0-9]+)-(?=[0-9]{1,2}\b))?([0-9]+(?::[0-9]{1,2}){0,2})")
_LONGEST_MIN = 3650 * 24 * 60  # a longer limit can only be a typing error


def minutes(value: Any) -> int:
    """Return a time limit in minutes, rounded up.

    Raises:
        ValueError: The notation is unknown, the limit is zero or above ten years, or YAML made
            an integer of an unquoted clock time (`2:00:00` becomes 7200, which would mean five
            days).
    """
    text = str(value).strip()
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time limit; {_NOTATION}")
    clock = [*map(int, match[2].split(":"))]
    if match[1] is None and len(clock) < 3:  # without days, minutes come first
        clock.insert(0, 0)
    seconds = sum(count * unit for count, unit in zip(clock, (3600, 60, 1), strict=False))
    limit_min = -(-seconds // 60) + int(match[1] or 0) * 24 * 60
    if not 0 < limit_min <= _LONGEST_MIN:
        raise ValueError(f"expected a minute to ten years; {_NOTATION}")
    if text.isdigit() and limit_min >= 3600 and limit_min % 60 == 0:
        read = slurm_notation(limit_min // 60)
        raise ValueError(
            f'looks like an unquoted {read}, which YAML reads in seconds; write "{read}" in '
            f"quotes, or {slurm_notation(limit_min)} for {text} minutes"
        )
    return limit_min


def slurm_notation(limit_min: int) -> str:
    """Return minutes as D-HH:MM:SS, or HH:MM:SS below a day."""
    days, rest = divmod(limit_min, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock
