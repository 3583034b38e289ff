"""All ranks of an engine: rank 0, the processes of the others, and their connections."""

import itertools
import logging
from dataclasses import replace
from time import monotonic, perf_counter, sleep

import torch

from inference.parallel.groups import RankGroups
from inference.ranks.base import RankBase, StepResult
from inference.ranks.node_ranks import NodeRanks
from inference.ranks.plan import Command, StepPlan, pack_message
from inference.ranks.rendezvous import Rendezvous, device_problems
from inference.ranks.settings import RankSettings
from inference.ranks.startup import failure_of, has_reached, make_rank, release_ranks

logger = logging.getLogger(__name__)

_GRACE_S = 2.0  # for workers to exit
_POLL_S = 0.02
# Expected errors of loading, such as damaged weights or too little memory.
_LOAD_ERRORS = (ValueError, OSError, RuntimeError, MemoryError)
_LOG_EVERY_S = 20.0  # while a start waits for ranks


class RankError(RuntimeError):
    """A rank could not start, has exited, or does not answer."""


class RankGroup:
    """Rank 0 in this process, and the other ranks.

    One thread, which must live as long as the ranks, calls all methods but `problem` and `end`.

    Attributes:
        rank: Rank 0, once it is loaded.
    """

    rank: RankBase

    def __init__(
        self,
        settings: RankSettings,
        *,
        start_timeout_s: float,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Use the ranks that a launcher has started, through `rendezvous`; None starts new ones."""
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._count = settings.world_size
        self._others: Rendezvous | NodeRanks | None = rendezvous
        self._groups: RankGroups | None = None
        self._busy_since: float | None = None
        self._milestones = itertools.count()

    def start(self) -> None:
        """Load every rank and connect them.

        After an error the caller must call `end`; `problem` may know the reason.

        Raises:
            RankError: Ranks failed; the message has every reason.
            RuntimeError: Ranks do not connect.
            TimeoutError: Ranks have not loaded within `start_timeout_s`.
        """
        torch.set_num_threads(self._settings.threads)
        started = perf_counter()
        if self._count == 1:
            self.rank = _load(self._settings)
            self.rank.prepare()
        else:
            self._start_all()
        logger.info("%d ranks loaded in %.1f s", self._count, perf_counter() - started)

    def _start_all(self) -> None:
        if self._others is None:
            self._others = NodeRanks(timeout_s=self._settings.rank_timeout_s)
        self._others.announce(self._settings)
        problems = {}
        try:
            self.rank = _load(self._settings)
        except RankError as error:
            problems[0] = str(error)
        self._meet("loaded", problems)
        self._groups = self.rank.connect(self._others.store, self._settings)
        self.rank.prepare()
        self._meet("prepared", {})

    def exchange(self, ft_dir: str) -> None:
        """Replace the weights of all ranks by those of a folder with the same config.ini.

        The cache is emptied. After an error the ranks are unusable.

        Raises:
            RankError: Ranks failed; the message has every reason.
            TimeoutError: Ranks have not loaded within `start_timeout_s`.
        """
        started, settings = perf_counter(), replace(self._settings, ft_dir=ft_dir)
        if self._groups is not None:
            self._groups.send_message(pack_message(Command("exchange", ft_dir)))
        try:
            self.rank.exchange(settings)
        except _LOAD_ERRORS as error:
            raise RankError(f"{type(error).__name__}: {error}") from error
        self._meet("loaded", {})
        self.rank.prepare()
        self._meet("prepared", {})
        self._settings = settings
        logger.info("%d ranks exchanged in %.1f s", self._count, perf_counter() - started)

    def _meet(self, done: str, problems: dict[int, str]) -> None:
        """Let the other ranks continue once all have reached the milestone `done`.

        `problems` holds the failure of rank 0, if any.

        Raises:
            RankError: Ranks failed; the message has every reason.
        """
        if self._others is None:
            return
        milestone = next(self._milestones)
        problems |= self._wait_until(self._others, milestone, done)
        if not problems and self._groups is None:
            devices = device_problems(self._others.store, range(1, self._count), self.rank.device)
            problems |= devices
        if problems:
            raise RankError(_describe(problems))
        release_ranks(self._others.store, milestone)

    def _wait_until(
        self, others: Rendezvous | NodeRanks, milestone: int, done: str
    ) -> dict[int, str]:
        """Wait until every other rank has reached a milestone or failed; return the failures.

        The wait ends early when a rank's process has exited.

        Raises:
            TimeoutError: With the ranks that did not answer.
        """
        waiting, problems = set(range(1, self._count)), {}
        logged = monotonic()
        deadline = logged + self._start_timeout_s
        while True:
            for rank in sorted(waiting):
                problem = failure_of(others.store, rank)
                if problem is not None:
                    problems[rank] = problem
                if problem is not None or has_reached(others.store, rank, milestone):
                    waiting.discard(rank)
            if not waiting:
                return problems
            if ended := others.problems():
                return problems | ended
            names = ", ".join(map(str, sorted(waiting)))
            if monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {names} have not {done} the model in {self._start_timeout_s:g} s"
                )
            if monotonic() > logged + _LOG_EVERY_S:
                logged = monotonic()
                logger.warning("waiting for ranks %s, which have not %s the model", names, done)
            sleep(_POLL_S)

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
        """Wait until a step is computed; meanwhile `problem` reports a rank that takes too long."""
        self._busy_since = monotonic()
        result.wait()
        self._busy_since = None

    def ping(self) -> None:
        """Wait until every rank has answered."""
        if self._groups is None:
            return
        self._busy_since = monotonic()
        self._groups.send_message(pack_message(Command("ping")))
        self.rank.ping()
        self._busy_since = None

    def problem(self) -> str | None:
        """Return why the ranks cannot continue, or None; may be called from any thread."""
        if self._others is not None and (problems := self._others.problems()):
            return _describe(problems)
        since = self._busy_since
        if self._count > 1 and since is not None:
            waited = monotonic() - since
            if waited > self._settings.rank_timeout_s:
                return f"a rank has not answered for {waited:.1f} s"
        return None

    def end(self, *, grace_s: float = _GRACE_S) -> None:
        """End the other ranks; may be called from any thread, and repeatedly."""
        if self._groups is not None:
            self._groups.abort()
        if self._others is not None:
            self._others.close(grace_s=grace_s)

    def stop(self) -> None:
        """Stop the other ranks, and wait until they have ended."""
        if self._groups is not None:
            try:
                self._groups.send_message(pack_message(Command("stop")))
                self.rank.close()
            except RuntimeError as error:  # a rank has already exited
                logger.warning("stopping ranks: %s", error)
        self.end()


def _load(settings: RankSettings) -> RankBase:
    try:
        return make_rank(settings)
    except _LOAD_ERRORS as error:
        raise RankError(f"{type(error).__name__}: {error}") from error


def _describe(reasons: dict[int, str]) -> str:
    return "\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
