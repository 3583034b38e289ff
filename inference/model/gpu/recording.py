"""Recording of CUDA graphs: single graphs, graphs of several sizes, and the choice of sizes."""

import contextlib
import functools
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOG_S = 5.0

# Sizes of graphs in tokens: (bound, distance of sizes up to it).
_SIZES = ((1024, 64), (2048, 128), (8192, 256), (16384, 512))
# Largest product of a rank's parameters and tokens, about 30 ms on an H200. Launching the 300
# kernels of such a step one by one takes a host 12 to 40 ms. Larger steps are bound by the GPU, and
# padding to a graph's size would only cost time.
_PRODUCTS = 1e13


def token_graph_sizes(parameters: int, *, most: int = _SIZES[-1][0]) -> list[int]:
    """Return the ascending sizes of graphs in tokens, up to a step of `most` tokens.

    `parameters` is the number of parameters of a rank.
    """
    most = min(most, int(_PRODUCTS / parameters))
    sizes = [0]
    for bound, step in _SIZES:
        sizes += range(sizes[-1] + step, min(most + step - 1, bound) + 1, step)
    return sizes[1:]


class SizedGraphs(ABC):
    """Graphs of several sizes, which share memory, in records with an attribute `graph`."""

    def __init__(self, sizes: Sequence[int], what: str) -> None:
        """Prepare; `sizes` ascend, `what` names the graphs in the log."""
        self._sizes, self._what = sizes, what
        self._graphs: dict[int, Any] = {}

    @abstractmethod
    def _record(self, size: int, pool: Any) -> Any:
        """Record a graph; `pool` is the memory pool of the other graphs, None for the first."""

    def holding(self, count: int) -> Any:
        """Return the smallest graph that is large enough, or None."""
        size = next((size for size in self._sizes if size >= count), None)
        return None if size is None else self._graphs[size]

    def record(self) -> None:
        """Record every size, at the same time on all ranks."""
        began = logged = perf_counter()
        graphs, sizes, pool = self._graphs, self._sizes, None
        with _no_collection():
            for size in reversed(sizes):  # the largest allocates all memory that the others need
                graphs[size] = self._record(size, pool)
                pool = graphs[size].graph.pool()
                if perf_counter() - logged > _LOG_S:
                    logged = perf_counter()
                    done = len(graphs)
                    logger.info("%d of %d graphs of %s recorded", done, len(sizes), self._what)
        if sizes:
            logger.info(
                "%d graphs of %s, of up to %d, recorded in %.1f s",
                *(len(graphs), self._what, sizes[-1], perf_counter() - began),
            )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and not again before the end: freeing a graph breaks a recording."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings; freed memory is only reused on the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record_graph(
    run: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the kernels that `run` launches; return the graph, and its outputs from `run`.

    Args:
        run: Launches kernels on fixed memory; it is called twice.
        device: A GPU.
        pool: Memory pool to share with graphs that never run at the same time, or None.
    """
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()  # a first call, not recorded, in which libraries choose kernels and allocate
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's threads query events meanwhile, which must not invalidate the recording.
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        outputs = run()
    return graph, outputs
