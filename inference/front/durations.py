"""Triton's durations of the engine's models, in the engine's own measure.

Triton (2.51) stops the clock of a request when the Python backend has taken it over, long before
the answer. With the engine's values in their place, dashboards that read these metrics are right.
"""

from __future__ import annotations

import re
from collections import defaultdict

_ENGINE = re.compile(
    r"^slipway_request_(?P<which>duration|queue)_seconds_sum\{"
    r'(?:[^}]*,)?model="(?P<model>[^"]+)"[^}]*\} (?P<value>\S+)$',
    re.MULTILINE,
)
_TRITON = re.compile(
    r"^(?P<name>nv_inference_(?P<which>request|queue|compute_infer)_duration_us"
    r'\{(?:[^}]*,)?model="(?P<model>[^"]+)"[^}]*\}) \S+$',
    re.MULTILINE,
)


def with_engine_durations(metrics: str) -> str:
    """Return the text of `/metrics` with the durations that the engine has measured.

    A request's time in the queue counts as queue, the rest as inference. Models without an engine
    are left as they are.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for each in _ENGINE.finditer(metrics):  # an engine for each instance of a model
        sums[each["model"], each["which"]] += float(each["value"])

    def replaced(line: re.Match[str]) -> str:
        request_s = sums.get((line["model"], "duration"))
        if request_s is None:
            return line[0]
        queue_s = sums.get((line["model"], "queue"), 0.0)
        seconds = {"request": request_s, "queue": queue_s, "compute_infer": request_s - queue_s}
        return f"{line['name']} {round(max(seconds[line['which']], 0.0) * 1e6)}"

    return _TRITON.sub(replaced, metrics)
