"""Base of the models that answer each request at once, such as the text models."""

from inference.backend.arguments import ModelArguments, RequestInputs
from inference.backend.requests import Array, Tensors
from inference.backend.triton_model import TritonTensorModel
from inference.decoding.rows import SessionTurn


class TensorModel(TritonTensorModel):
    """A model that answers each request at once; subclasses add `setup` and `run`."""

    def load(self, arguments: ModelArguments) -> None:
        """Load the model. Raises ValueError if that is impossible."""
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
