"""Requests for the conversion and the Triton repository, built from the configuration."""

from pathlib import Path

from export_scripts.conversion.hub import cached_model
from export_scripts.conversion.request import OUTPUT_FORMATS, ConversionRequest
from export_scripts.triton.parameters import FLAG, PARAMETERS
from export_scripts.triton.repository import ENSEMBLE, RepositoryRequest, repository_models
from foundations.values import shown
from launcher_scripts.configuration.schema import Config
from stages.convert import KEYS as CONVERSION_KEYS
from stages.export import KEYS as REPOSITORY_KEYS


def conversion_request(config: Config, *, exports: bool) -> ConversionRequest:
    """Return the request for the conversion; with `exports`, a repository is built from it.

    Raises:
        ValueError: A repository cannot hold the output format.
    """
    has_shards = config.convert.format == OUTPUT_FORMATS[0]
    if exports and not has_shards:
        raise ValueError(
            f"convert.format={config.convert.format} makes a folder for other engines or trainers, "
            "which a repository cannot hold: run stages=[convert] alone, or leave "
            f"convert.format={OUTPUT_FORMATS[0]}"
        )
    values = {name: config.at(key) for name, key in CONVERSION_KEYS.items()}
    values |= {
        "given": tuple((name, str(value)) for name, value in config.convert.given.items()),
        "checkpoint_path": cached_model(config.export.model.checkpoint_path),
        "output_dir": config.export.triton_deployment.triton_model_dir / "1",
        "for_text": exports and len(_model_folders(config)) > 1,
    }
    if not has_shards:  # the sizes are the server's; only shards are divided
        values |= {"tp_size": 1, "pp_size": 1}
    return ConversionRequest(**values)


def repository_request(config: Config) -> RepositoryRequest:
    """Return the request for the Triton repository."""
    values = {name: config.at(key) for name, key in REPOSITORY_KEYS.items()}
    parameters = {}
    for name, value in values["parameters"].items():
        known = PARAMETERS.get(name)
        # A boolean flag is written as a digit.
        is_flag = isinstance(value, bool) and (known is None or known.kind is FLAG)
        parameters[name] = str(int(value)) if is_flag else shown(value)
    values |= {
        "int8_mode": int(values["int8_mode"]),
        "enable_custom_all_reduce": int(values["enable_custom_all_reduce"]),
        "parameters": parameters,
    }
    return RepositoryRequest(**values)


def has_ensemble(config: Config) -> bool:
    """Return whether the exported repository includes the ensemble (text in, text out)."""
    return any(folder.name == ENSEMBLE for folder in _model_folders(config))


def _model_folders(config: Config) -> list[Path]:
    """Return the model folders of the exported repository."""
    return repository_models(repository_request(config), kind=config.export.run.model_type)
