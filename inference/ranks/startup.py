"""Milestones of a start, and its failures, which ranks report through their store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Literal, get_args

from torch.distributed.distributed_c10d import Store

_POLL_S = 0.02
_GO = "go"

# States of a rank that the others wait for.
Milestone = Literal["loaded", "prepared"]


def report_reached(store: Store, rank: int, milestone: Milestone) -> None:
    """Report that a rank has reached a milestone."""
    store.set(f"{milestone}/{rank}", json.dumps({"problem": None}))


def report_failure(store: Store, rank: int, error: BaseException) -> None:
    """Report why a rank ends; do nothing when rank 0 is gone."""
    try:
        text = json.dumps({"problem": f"{type(error).__name__}: {error}"})
        store.set(f"failed/{rank}", text)
        for milestone in get_args(Milestone):
            store.set(f"{milestone}/{rank}", text)
    except RuntimeError:
        return


def failure_of(store: Store, rank: int) -> str | None:
    """Return the reason that a rank has reported for its end, if any."""
    if not store.check([f"failed/{rank}"]):
        return None
    return str(json.loads(store.get(f"failed/{rank}"))["problem"])


def wait_until_reached(
    store: Store,
    ranks: Sequence[int],
    milestone: Milestone,
    *,
    timeout_s: float,
    check: Callable[[], None],
) -> dict[int, str]:
    """Wait until every rank has reached a milestone or failed; return the failures.

    Args:
        store: The rendezvous.
        ranks: The ranks to wait for.
        milestone: The state to wait for.
        timeout_s: Longest wait.
        check: Called repeatedly; raises to end the wait.

    Raises:
        TimeoutError: naming the ranks that did not answer.
    """
    waiting, problems = set(ranks), {}
    deadline = monotonic() + timeout_s
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"{milestone}/{rank}"]):
                problem = json.loads(store.get(f"{milestone}/{rank}"))["problem"]
                if problem is not None:
                    problems[rank] = problem
                waiting.discard(rank)
        if not waiting:
            break
        check()
        if monotonic() > deadline:
            names = ", ".join(map(str, sorted(waiting)))
            raise TimeoutError(f"ranks {names} have not {milestone} the model in {timeout_s:g} s")
        sleep(_POLL_S)
    return problems


def give_go(store: Store, milestone: Milestone) -> None:
    """Let the ranks continue: connect once all have loaded, serve once all are prepared."""
    store.set(f"{_GO}/{milestone}", "")


def wait_for_go(store: Store, milestone: Milestone) -> None:
    """Wait until every rank has reached a milestone, however slow the slowest is.

    Rank 0 gives up earlier, after its start_timeout_s, and this process ends with it.
    """
    store.wait([f"{_GO}/{milestone}"], timedelta(days=1))
