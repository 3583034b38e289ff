"""Base of the models that answer each request at once, such as the text models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from inference.backend.answering import model_error
from inference.backend.arguments import ModelArguments, RequestInputs
from inference.backend.requests import Array, InferRequest, ModelError, ModelHost, Outputs, Tensors
from inference.backend.triton_model import TritonModel, TritonSender
from inference.decoding.rows import SessionTurn

# Larger requests run in a process of their own, where there is one: they may take seconds, in which
# some tokenizers keep Python's lock.
_INLINE_BYTES = 16 << 10


class TensorModel(TritonModel):
    """A model that answers each request at once; subclasses add `setup` and `run`.

    Attributes:
        apart: answers a request, whose size in bytes it gets too, as `answer` does, in another
            process; None without one.
    """

    apart: Callable[[InferRequest, int], Awaitable[dict[str, Array]]] | None = None

    def load(self, arguments: ModelArguments, host: ModelHost | None = None) -> None:
        """Load the model, see `TritonModel`."""
        del host
        self.interactive = arguments.flag("interactive")
        self.setup(arguments)

    def setup(self, arguments: ModelArguments) -> None:
        """Prepare for `run`. Raises ValueError if the model cannot be loaded."""
        raise NotImplementedError

    def run(self, tensors: Tensors) -> dict[str, Array]:
        """Return the outputs of one request. Raises ValueError for a bad request."""
        raise NotImplementedError

    def turn(self, tensors: Tensors, *, continues: bool) -> dict[str, Array]:
        """Return the outputs of a turn, which starts a session or `continues` it; see `run`."""
        del continues
        return self.run(tensors)

    def answer(self, tensors: Tensors, turn: SessionTurn | None) -> dict[str, Array]:
        """Return the outputs of one request. Raises ValueError for a bad request.

        The tensors of an interactive model have one more axis, of size 1, in front.
        """
        if not self.interactive:
            return self.run(RequestInputs(tensors))
        outputs = self.turn(
            RequestInputs((name, value[0]) for name, value in tensors.items()),
            continues=turn is not None and not turn.starts,
        )
        return {name: value[None] for name, value in outputs.items()}

    async def whole(self, request: InferRequest) -> Outputs:
        """Return the outputs of one request. Raises ModelError."""
        if self.apart is None or (size := _size_bytes(request.tensors)) <= _INLINE_BYTES:
            return self._answered(request)
        try:
            return await self.apart(request, size)
        except Exception as error:  # whatever it is, it is this request's answer alone
            raise model_error(error)[0] from None

    def respond(self, request: InferRequest, sender: TritonSender) -> None:
        """Answer a request, see `TritonModel`."""
        try:
            sender.send(self._answered(request))
        except ModelError as error:
            sender.fail(error)

    def _answered(self, request: InferRequest) -> Outputs:
        try:
            return self.answer(request.tensors, request.turn)
        except Exception as error:  # whatever it is, it is this request's answer alone
            raise model_error(error)[0] from None


def _size_bytes(tensors: Mapping[str, Array]) -> int:
    return sum(
        sum(map(len, each.reshape(-1))) if each.dtype == object else each.nbytes
        for each in tensors.values()
    )
