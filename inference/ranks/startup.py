"""How ranks find each other and tell of a start that failed, over one store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep

from torch._C._distributed_c10d import Store

_POLL_S = 0.02
_GO = "go"


def report_loaded(store: Store, rank: int) -> None:
    """Say that a rank holds its part of the model."""
    store.set(f"loaded/{rank}", json.dumps({"problem": None}))


def report_failure(store: Store, rank: int, error: BaseException) -> None:
    """Say why a rank ends; silently give up when rank 0 is gone."""
    try:
        text = json.dumps({"problem": f"{type(error).__name__}: {error}"})
        store.set(f"failed/{rank}", text)
        store.set(f"loaded/{rank}", text)
    except RuntimeError:
        return


def failure_of(store: Store, rank: int) -> str | None:
    """Return why a rank said it ended, if it did."""
    if not store.check([f"failed/{rank}"]):
        return None
    return str(json.loads(store.get(f"failed/{rank}"))["problem"])


def wait_until_loaded(
    store: Store, ranks: Sequence[int], *, timeout_s: float, check: Callable[[], None]
) -> dict[int, str]:
    """Wait until every rank has loaded or failed; return the reasons of those that failed.

    Args:
        store: The rendezvous.
        ranks: Who is awaited.
        timeout_s: Longest wait.
        check: Called now and then; raises to end the wait.

    Raises:
        TimeoutError: naming the ranks that did not answer.
    """
    waiting, problems = set(ranks), {}
    deadline = monotonic() + timeout_s
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"loaded/{rank}"]):
                problem = json.loads(store.get(f"loaded/{rank}"))["problem"]
                if problem is not None:
                    problems[rank] = problem
                waiting.discard(rank)
        if not waiting:
            break
        check()
        if monotonic() > deadline:
            names = ", ".join(map(str, sorted(waiting)))
            raise TimeoutError(f"ranks {names} did not load the model within {timeout_s:g} s")
        sleep(_POLL_S)
    return problems


def give_go(store: Store) -> None:
    """Let the loaded ranks connect."""
    store.set(_GO, "")


def wait_for_go(store: Store, *, timeout_s: float = 86400.0) -> None:
    """Wait until every rank has loaded, as slow as the slowest may be.

    Rank 0 gives up earlier, after its start_timeout_s, and this process ends with it.
    """
    store.wait([_GO], timedelta(seconds=timeout_s))
