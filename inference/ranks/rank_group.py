"""All ranks of an engine: rank 0, the other processes, and their connections."""

import logging
from time import monotonic, perf_counter, sleep

import torch

from inference.parallel.groups import RankGroups
from inference.ranks.base import RankBase, StepResult
from inference.ranks.node_ranks import NodeRanks
from inference.ranks.plan import Command, StepPlan, pack_message
from inference.ranks.rendezvous import Rendezvous, device_problems
from inference.ranks.settings import RankSettings
from inference.ranks.startup import Milestone, failure_of, give_go, make_rank

logger = logging.getLogger(__name__)

_GRACE_S = 2.0  # for workers to end by themselves
_POLL_S = 0.02
_LOG_EVERY_S = 20.0  # the log of a start that hangs names the ranks it waits for


class RankError(RuntimeError):
    """A rank could not start, has ended, or does not answer."""


class RankGroup:
    """Rank 0 in this process, and the other ranks.

    All methods but `problem` and `end` belong to one thread, which must live as long as the ranks.
    """

    def __init__(
        self,
        settings: RankSettings,
        *,
        start_timeout_s: float,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Take the ranks that a launcher has started, by their `rendezvous`; None starts them."""
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._count = settings.world_size
        self._others: Rendezvous | NodeRanks | None = rendezvous
        self._groups: RankGroups | None = None
        self._rank: RankBase | None = None
        self._busy_since: float | None = None

    def start(self) -> None:
        """Load every rank and connect them.

        After an error `problem` may give its reason; the caller then ends the ranks with `end`.

        Raises:
            RankError: Some ranks failed, for the reasons given.
            RuntimeError: Some ranks do not connect.
            TimeoutError: Some ranks have not loaded within `start_timeout_s`.
        """
        torch.set_num_threads(self._settings.threads)
        started = perf_counter()
        if self._count == 1:
            self._rank = _load(self._settings)
            self._rank.prepare()
        else:
            self._start_all()
        logger.info("%d ranks loaded in %.1f s", self._count, perf_counter() - started)

    def _start_all(self) -> None:
        if self._others is None:
            self._others = NodeRanks(timeout_s=self._settings.rank_timeout_s)
        others, store = self._others, self._others.store
        others.announce(self._settings)
        problems: dict[int, str] = {}
        try:
            self._rank = _load(self._settings)
        except RankError as error:
            problems[0] = str(error)
        problems |= self._wait_until(others, "loaded")
        if self._rank is not None and not problems:
            problems = device_problems(store, range(1, self._count), self._rank.device)
        if problems:
            raise RankError(_joined(problems))
        assert self._rank is not None
        give_go(store, "loaded")
        self._groups = self._rank.connect(store, self._settings)
        self._rank.prepare()
        if problems := self._wait_until(others, "prepared"):
            raise RankError(_joined(problems))
        give_go(store, "prepared")

    def _wait_until(self, others: Rendezvous | NodeRanks, milestone: Milestone) -> dict[int, str]:
        """Wait until every other rank has reached a milestone or failed; return the failures.

        The wait ends early when one of them has ended.

        Raises:
            TimeoutError: naming the ranks that did not answer.
        """
        waiting, problems = set(range(1, self._count)), {}
        logged = monotonic()
        deadline = logged + self._start_timeout_s
        while True:
            for rank in sorted(waiting):
                problem = failure_of(others.store, rank)
                if problem is not None:
                    problems[rank] = problem
                if problem is not None or others.store.check([f"{milestone}/{rank}"]):
                    waiting.discard(rank)
            if not waiting:
                return problems
            if ended := others.problems():
                return problems | ended
            names = ", ".join(map(str, sorted(waiting)))
            if monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {names} have not {milestone} the model in {self._start_timeout_s:g} s"
                )
            if monotonic() > logged + _LOG_EVERY_S:
                logged = monotonic()
                logger.warning(
                    "waiting for ranks %s, which have not %s the model", names, milestone
                )
            sleep(_POLL_S)

    @property
    def rank(self) -> RankBase:
        """Rank 0."""
        assert self._rank is not None, "ranks are not started"
        return self._rank

    def run(self, plan: StepPlan, embeddings: torch.Tensor | None) -> StepResult:
        """Run one step on all ranks."""
        self._busy_since = monotonic()
        if self._groups is not None:
            self._groups.send_message(pack_message(plan))
        result = self.rank.run(plan, embeddings)
        self._busy_since = None
        assert result is not None
        return result

    def wait(self, result: StepResult) -> None:
        """Return once all of a step is computed; `problem` reports a rank that takes too long."""
        self._busy_since = monotonic()
        result.wait()
        self._busy_since = None

    def ping(self) -> None:
        """Return once every rank has answered."""
        if self._groups is None:
            return
        self._busy_since = monotonic()
        self._groups.send_message(pack_message(Command.PING))
        self.rank.ping()
        self._busy_since = None

    def problem(self) -> str | None:
        """Return why the ranks cannot continue, or None; may be called from any thread."""
        if self._others is not None and (problems := self._others.problems()):
            return _joined(problems)
        since = self._busy_since
        if self._count > 1 and since is not None:
            waited = monotonic() - since
            if waited > self._settings.rank_timeout_s:
                return f"a rank has not answered for {waited:.1f} s"
        return None

    def end(self, *, grace_s: float = _GRACE_S) -> None:
        """End the other ranks; may be called from any thread, and again."""
        if self._groups is not None:
            self._groups.abort()
        if self._others is not None:
            self._others.close(grace_s=grace_s)

    def stop(self) -> None:
        """Stop the other ranks, and wait until they have ended."""
        if self._groups is not None:
            try:
                self._groups.send_message(pack_message(Command.STOP))
                self.rank.close()
            except RuntimeError as error:  # a rank that is gone already
                logger.warning("stopping ranks: %s", error)
        self.end()


def _load(settings: RankSettings) -> RankBase:
    try:
        return make_rank(settings)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        raise RankError(f"{type(error).__name__}: {error}") from error


def _joined(reasons: dict[int, str]) -> str:
    return "\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
