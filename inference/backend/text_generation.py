"""Text in, text out in one model, with the tensors that clients of PyTriton know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, ClassVar

from export_scripts.ft.config_ini import read_config
from inference.backend.engine_model import Exchange
from inference.backend.nemo_service import NemoDeployService, NemoService
from inference.backend.python_backend import GenerationModel
from inference.backend.text_service import TextService
from inference.backend.tokenizer import load_tokenizer
from inference.backend.triton_model import RequestInputs, output_tensors, request_tensors, response


class TextModel(GenerationModel):
    """Serves a converted model and the tokenizer next to its weights."""

    service_class: ClassVar[type[TextService]] = TextService

    @cached_property
    def service(self) -> TextService:
        """The service of the running engine."""
        folder = self.settings.checkpoint_path
        _, config = read_config(folder)
        tasks = [task.task_name for task in config.tasks]
        return self.service_class(self.engine, load_tokenizer(folder), tasks)

    def make_engine(self, settings: Any) -> Any:
        """See `EngineModel`; a folder without a tokenizer is refused before it is loaded."""
        load_tokenizer(settings.checkpoint_path)
        return super().make_engine(settings)

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue the rows of a request, see `EngineModel`."""
        rows = self.service.begin(RequestInputs(request_tensors(exchange.request)))

        def send(_: object) -> None:
            outputs = self.service.answer(rows)
            exchange.send(response(output_tensors(outputs, exchange.wanted)), final=True)

        return AllRows([row.future for row in rows]), send


class NemoModel(TextModel):
    """The same with the tensors of PyTriton's NeMo example."""

    service_class = NemoService


class NemoDeployModel(TextModel):
    """The same with the tensors of NeMo's own query clients."""

    service_class = NemoDeployService


class AllRows(Future[None]):
    """Done when every row is, or as soon as one has failed; cancelling it cancels the rows."""

    def __init__(self, rows: Sequence[Future[Any]]) -> None:
        super().__init__()
        self._rows = rows
        self._left = len(rows)
        self._counting = threading.Lock()
        for row in rows:
            row.add_done_callback(self._count)

    def _count(self, row: Future[Any]) -> None:
        with self._counting:
            self._left -= 1
            if self.done():
                return
            if row.cancelled():
                super().cancel()
            elif (error := row.exception()) is not None:
                self.set_exception(error)
            elif self._left == 0:
                self.set_result(None)
                return
            else:
                return
        self._cancel_rows()

    def cancel(self) -> bool:
        """Cancel the rows that are not done."""
        self._cancel_rows()
        return super().cancel()

    def _cancel_rows(self) -> None:
        for row in self._rows:
            row.cancel()
