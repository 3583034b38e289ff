"""Stage `export`: FasterTransformer shards become a Triton repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from export_scripts.triton.repository import (
    CONFIG_FILE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    RepositoryRequest,
    build_repository,
    check_repository,
)
from stages.base import JobSettings, Stage, Summary, as_json
from stages.progress import Progress

KEYS: Mapping[str, str] = {
    "model_dir": "export.triton_deployment.triton_model_dir",
    "tp_size": "export.model.tensor_model_parallel_size",
    "pp_size": "export.triton_deployment.pipeline_model_parallel_size",
    "max_batch_size": "export.triton_deployment.max_batch_size",
    "data_type": "export.triton_deployment.data_type",
    "int8_mode": "export.triton_deployment.int8_mode",
    "enable_custom_all_reduce": "export.triton_deployment.enable_custom_all_reduce",
    "decoupled": "export.triton_deployment.decoupled",
    "ensemble": "export.triton_deployment.ensemble",
    "portable": "export.triton_deployment.portable",
    "interactive": "export.triton_deployment.interactive",
    "answer_only": "export.triton_deployment.answer_only",
    "max_queue_delay_us": "export.triton_deployment.max_queue_delay_us",
    "instance_count": "export.triton_deployment.instance_count",
    "model_type": "export.triton_deployment.model_type",
    "parameters": "export.triton_deployment.parameters",
    "engine": "deploy.engine",
    "overwrite": "overwrite",
}


class ExportStage(Stage):
    """Writes the models of a Triton repository around the shards of `convert`."""

    name = "export"

    def __init__(self, job: JobSettings, request: RepositoryRequest) -> None:
        super().__init__(job)
        self.request = replace(request, overwrite=job.overwrite)

    @property
    def ft_dir(self) -> Path:
        """The folder of shards that the repository serves."""
        return self.request.weights_dir

    def check(self) -> list[str]:
        """Return the problems of sizes, types and destination."""
        return check_repository(self.request, names=KEYS)

    def outputs(self) -> list[Path]:
        """Return the configuration of each model in the repository."""
        return [folder / CONFIG_FILE for folder in self.model_folders()]

    def model_folders(self) -> list[Path]:
        """Return the folder of each model: the model, and the ensemble with its neighbours."""
        model_dir = self.request.model_dir
        if not self.request.ensemble:
            return [model_dir]
        around = (PREPROCESSING, POSTPROCESSING, ENSEMBLE)
        return [model_dir, *(model_dir.parent / name for name in around)]

    def marker_path(self) -> Path:
        """Return the marker inside the model's folder."""
        return self.request.model_dir / "export.json"

    def identity(self) -> dict[str, Any]:
        """Return every setting that stands in the repository."""
        values = asdict(self.request)
        return {
            KEYS.get(name, f"export.triton_deployment.{name}"): as_json(each)
            for name, each in values.items()
            if name != "overwrite"
        }

    def inputs(self) -> list[Path]:
        """Return the shards."""
        return [self.ft_dir]

    def run(self, progress: Progress) -> Summary:
        """Build the repository and return the names of its models."""
        progress.update("writing the repository")
        folders = build_repository(self.request)
        return {
            "repository": str(self.request.model_dir.parent),
            "models": [folder.name for folder in folders],
        }
