"""Base class of the models with an engine.

One instance runs any number of requests. After a failure of its engine a model goes out of service.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.identity import served_identity
from export_scripts.ft.validation import validate_directory
from foundations.errors import CheckpointMismatchError
from inference.backend.answering import EngineRequest
from inference.backend.arguments import ModelArguments
from inference.backend.instances import Instance, occupy
from inference.backend.metrics import ModelMetrics
from inference.backend.model_settings import read_settings
from inference.backend.requests import InferRequest, ModelError, ModelHost, Submitted
from inference.backend.triton_model import TritonModel, TritonSender
from inference.ranks.launched_rank import open_rendezvous
from inference.ranks.processes import fork_workers, start_workers
from inference.system.launch_environment import RENDEZVOUS_VARIABLE
from inference.system.process_memory import keep_loaded
from inference.system.supervision import BUSY

if TYPE_CHECKING:
    from inference.engine.base import EngineBase

# Interval at which Python threads hand over the GIL. With the default of 5 ms, new tokens wait
# while the engine's thread plans the next step.
_SWITCH_S = 0.0005


class EngineModel(TritonModel):
    """Base of the models with an engine; subclasses add `engine_class` and `submit`.

    `engine_class` is `module:class`; the module imports torch. `served_by` lists the types of
    weights that can serve a model_type, if not just its own.

    Attributes:
        running: requests that the engine has accepted and not finished.
    """

    engine_class: ClassVar[str]
    served_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    engine: EngineBase
    former: EngineModel | None = None  # its engine is reused if the models agree
    running: set[EngineRequest]

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        """Start the engine.

        The modules of this package import torch inside functions only, as text models do not need
        it. Raises ValueError for weights that are invalid or do not match config.pbtxt.
        """
        sys.setswitchinterval(_SWITCH_S)
        self.host, self.name = host, arguments.name
        self.settings = read_settings(arguments)
        self.decoupled = arguments.decoupled
        self.interactive = arguments.session_idle_s is not None
        self.bf16_inputs = arguments.bf16_inputs
        for key in self.settings.unknown:
            host.warn(f"parameter {key} is unknown and has no effect")
        for key in self.settings.without_effect:
            host.warn(f"parameter {key} has no effect in this engine")
        self._check_weights()
        self._confine(arguments.instance)
        self.engine = self._reused_engine() or self._new_engine()
        keep_loaded()
        self.metrics = ModelMetrics(
            self.name,
            arguments.instance,
            self.engine.load,
            served_identity(self.settings.checkpoint_path, arguments.parameters),
        )
        host.show(self.metrics)
        self.running = set()
        self._canary_steps = -1  # the engine's step count at the last canary
        self.engine.when_failed = host.go_out_of_service
        if (reason := self.engine.healthy()) is not None:  # it failed before `when_failed` was set
            host.go_out_of_service(reason)

    def _confine(self, instance: Instance) -> None:
        """Confine this process to its instance's devices. Raises ValueError if ranks span nodes."""
        placement = self.settings.placement
        if instance.count > 1 and os.environ.get(RENDEZVOUS_VARIABLE):
            raise ValueError(
                f"{self.name}: instance_group asks for {instance.count} instances, but the ranks "
                "of each are spread over nodes; set count to 1, and start a server for each."
            )
        first, sharing = occupy(instance, world_size=placement.world_size, device=placement.device)
        self.settings = replace(
            self.settings,
            engine=replace(self.settings.engine, sharing_engines=sharing),
            placement=replace(placement, first_device=first),
        )

    def _check_weights(self) -> None:
        """Check the folder of weights against its config.ini and the model_type.

        Every rank checks again when it loads; this early check is quick and reports a problem once.
        Raises CheckpointMismatchError or ValueError.
        """
        folder, own_type = self.settings.checkpoint_path, self.settings.model_type
        if problems := validate_directory(folder, checksums=False):
            raise CheckpointMismatchError([f"{folder} cannot be served:", *problems])
        family, _ = read_config(folder)
        if family.model_type not in self.served_by.get(own_type, (own_type,)):
            raise ValueError(
                f"model_type={own_type}, but {folder} holds a {family.model_type} model; export it "
                "again."
            )

    def _reused_engine(self) -> EngineBase | None:
        """Load the weights into the former model's engine and return it.

        Stops that engine and returns None if settings or sizes differ. Raises EngineFailedError.
        """
        former, self.former = self.former, None
        if former is None:
            return None
        folder = self.settings.checkpoint_path
        if type(former) is type(self) and (
            replace(former.settings, checkpoint_path=folder) == self.settings
        ):
            try:
                former.engine.exchange(folder)
            except ValueError as error:
                self.host.warn(f"{error}: a new engine is started")
            else:
                return former.engine
        former.engine.stop()
        return None

    def _new_engine(self) -> EngineBase:
        placement, options = self.settings.placement, self.settings.engine
        folder, count = self.settings.checkpoint_path, placement.world_size
        # Not None if a launcher has started the ranks.
        rendezvous = open_rendezvous(count, timeout_s=options.rank_timeout_s)
        if rendezvous is None:
            start_workers(folder, count)
        engine: EngineBase = pkgutil.resolve_name(self.engine_class)(
            folder, placement=placement, options=options, rendezvous=rendezvous
        )
        engine.start()
        return engine

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        """Queue a request in the engine; return its future and a function for its outputs.

        The function turns the result into outputs, and also each step that `on_step` gets; it
        returns None for a step without new outputs. Raises ValueError for an invalid request,
        EngineBusyError or EngineFailedError.
        """
        raise NotImplementedError

    def respond(self, request: InferRequest, sender: TritonSender) -> None:
        """Start a request, see `TritonModel`."""
        self._host.ask(sender, self, request)

    def check_progress(self) -> None:
        """Raise ModelError if the engine is busy and has made steps since the last canary."""
        steps, before = self.engine.steps, self._canary_steps
        self._canary_steps = steps
        if self.running and steps != before:
            raise ModelError(BUSY, "UNAVAILABLE")

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop()


def fork_ranks(arguments: ModelArguments) -> None:
    """Fork the other ranks of a model from this process, see `fork_workers`.

    Not for several instances, whose ranks start later on their own cores or GPUs, nor for ranks
    that a launcher has started.
    """
    with contextlib.suppress(ValueError):  # loading the model reports the problem
        settings = read_settings(arguments)
        if arguments.instance.count == 1 and not os.environ.get(RENDEZVOUS_VARIABLE):
            fork_workers(settings.checkpoint_path, settings.placement.world_size)
