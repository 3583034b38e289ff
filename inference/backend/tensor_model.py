"""Base class of the models that answer synchronously, such as the text models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from inference.backend.answering import model_error
from inference.backend.arguments import ModelArguments, RequestInputs
from inference.backend.requests import Array, InferRequest, ModelHost, Outputs, Tensors
from inference.backend.triton_model import TritonModel, TritonSender
from inference.decoding.rows import SessionTurn

# Larger requests run in a worker process if there is one: they may take seconds, during which some
# tokenizers hold the GIL.
_INLINE_BYTES = 16 << 10


class TensorModel(TritonModel):
    """A model that answers synchronously; subclasses add `setup` and `run`.

    Attributes:
        run_in_worker: like `answer`, but in another process; takes a request and its size in bytes.
            None if there is no such process.
    """

    run_in_worker: Callable[[InferRequest, int], Awaitable[dict[str, Array]]] | None = None

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
        """Return the outputs of a session's turn; `continues` is False for the first. See `run`."""
        del continues
        return self.run(tensors)

    def answer(self, tensors: Tensors, turn: SessionTurn | None) -> dict[str, Array]:
        """Return the outputs of one request. Raises ValueError for a bad request.

        The tensors of an interactive model have an additional first axis of size 1.
        """
        if not self.interactive:
            return self.run(RequestInputs(tensors))
        outputs = self.turn(
            RequestInputs((name, value[0]) for name, value in tensors.items()),
            continues=turn is not None and not turn.starts,
        )
        return {name: value[None] for name, value in outputs.items()}

    async def answer_request(self, request: InferRequest) -> Outputs:
        """Return the outputs of one request. Raises ModelError."""
        run, size = self.run_in_worker, _size_bytes(request.tensors)
        try:
            if run is None or size <= _INLINE_BYTES:
                return self.answer(request.tensors, request.turn)
            return await run(request, size)
        except Exception as error:  # of any kind: it concerns this request alone
            raise model_error(error)[0] from None

    def respond(self, request: InferRequest, sender: TritonSender) -> None:
        """Answer a request, see `TritonModel`."""
        try:
            sender.send(self.answer(request.tensors, request.turn))
        except Exception as error:  # of any kind: it concerns this request alone
            sender.fail(model_error(error)[0])


def _size_bytes(tensors: Mapping[str, Array]) -> int:
    return sum(
        sum(map(len, tensor.reshape(-1))) if tensor.dtype == object else tensor.nbytes
        for tensor in tensors.values()
    )
