"""The check of several ranks before a stage."""

import pytest

from inference.system.launch_environment import LaunchEnvironment
from stages.base import StageError
from stages.step import check_place


@pytest.mark.parametrize(
    ("ranks", "mpi", "reported"),
    [
        (4, "none", "sees 2 ranks instead of 4"),
        (2, "pmix", "has no PMIX_RANK: cluster.mpi=pmix does not reach it"),
    ],
)
def test_rank_that_is_alone_or_without_its_mpi_says_so(monkeypatch, ranks, mpi, reported):
    monkeypatch.delenv("PMIX_RANK", raising=False)
    place = LaunchEnvironment(rank=1, world_size=2)
    with pytest.raises(StageError, match=reported):
        check_place(place, ranks=ranks, mpi=mpi)
    check_place(place, ranks=2, mpi="none")
