"""Requests for the conversion and for the Triton repository, from the configuration."""

from dataclasses import fields
from pathlib import Path

from export_scripts.conversion.hub import cached_model
from export_scripts.conversion.request import OUTPUT_FORMATS, ConversionRequest
from export_scripts.triton.parameters import FLAG, PARAMETERS
from export_scripts.triton.repository import ENSEMBLE, RepositoryRequest, repository_models
from foundations.values import shown
from launcher_scripts.configuration.schema import Config


def conversion_request(config: Config, *, exports: bool) -> ConversionRequest:
    """Return the request for the conversion; `exports`: whether a repository follows.

    Raises:
        ValueError: The repository that follows cannot hold the format.
    """
    model = config.export.model
    deployment = config.export.triton_deployment
    own = dict(vars(config.convert))
    output_format, given = own.pop("format"), own.pop("given")
    has_shards = output_format == OUTPUT_FORMATS[0]
    if exports and not has_shards:
        raise ValueError(
            f"convert.format={output_format} makes a folder for other engines or trainers, which a "
            "repository cannot hold: run stages=[convert] alone, or leave "
            f"convert.format={OUTPUT_FORMATS[0]}"
        )
    return ConversionRequest(
        **own,
        output_format=output_format,
        given=tuple((name, str(value)) for name, value in given.items()),
        checkpoint_path=cached_model(Path(model.checkpoint_path)),
        checkpoint_name=model.checkpoint_name,
        output_dir=Path(deployment.triton_model_dir) / "1",
        # The ranks are the server's; other folders than shards have none.
        tp_size=model.tensor_model_parallel_size if has_shards else 1,
        pp_size=deployment.pipeline_model_parallel_size if has_shards else 1,
        weight_data_type=model.weight_data_type,
        processes=model.processes,
        model_type=config.export.run.model_type,
        for_text=exports and len(_model_folders(config)) > 1,
    )


def repository_request(config: Config) -> RepositoryRequest:
    """Return the request for the Triton repository."""
    triton = config.export.triton_deployment
    names = {each.name for each in fields(RepositoryRequest)}
    values = {name: value for name, value in vars(triton).items() if name in names}
    parameters = {}
    for name, value in triton.parameters.items():
        known = PARAMETERS.get(name)
        # A truth value where one is meant is a digit.
        is_flag = isinstance(value, bool) and (known is None or known.kind is FLAG)
        parameters[name] = str(int(value)) if is_flag else shown(value)
    values |= {
        "int8_mode": int(triton.int8_mode),
        "enable_custom_all_reduce": int(triton.enable_custom_all_reduce),
        "parameters": parameters,
    }
    return RepositoryRequest(
        **values,
        model_dir=Path(triton.triton_model_dir),
        tp_size=config.export.model.tensor_model_parallel_size,
        pp_size=triton.pipeline_model_parallel_size,
        engine=config.deploy.engine,
    )


def has_ensemble(config: Config) -> bool:
    """Return whether the exported repository includes the ensemble: text in, text out."""
    return any(folder.name == ENSEMBLE for folder in _model_folders(config))


def _model_folders(config: Config) -> list[Path]:
    """Return the folders of the exported repository: the model, and those that take text."""
    return repository_models(repository_request(config), kind=config.export.run.model_type)
