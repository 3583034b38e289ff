"""From the name of a model to its weights: a local path, or a download, converted where needed."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.commands import ProgressLine
from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from export_scripts.conversion.request import OPTION_NAMES
from export_scripts.errors import CheckpointMismatchError
from export_scripts.ft.config_ini import read_config

logger = logging.getLogger(__name__)

# Words of this command in the converter's messages.
_OPTION_NAMES = {
    **OPTION_NAMES,
    "checkpoint_path": "--hf-model-name",
    "output_dir": "--output-dir",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "weight_data_type": "--weight-data-type",
    "overwrite": "--overwrite",
}
# Files of a repository other than weights.
_DESCRIPTIONS = re.compile(r"[^/]+\.(json|txt|model)")
_WEIGHTS = (re.compile(r"[^/]+\.safetensors"), re.compile(r"pytorch_model[^/]*\.bin"))


@dataclass(frozen=True)
class ModelName:
    """The name that the user gives for the model: a local path, or a repository on the Hub."""

    text: str
    path: Path | None = None
    repository: str = ""
    file: str | None = None  # the one file of the repository to take; None to find it

    @property
    def key(self) -> str:
        """The name of the served model and of its folder."""
        name = self.text if self.path is None else self.path.resolve().name
        return re.sub(r"\W", "_", name, flags=re.ASCII)


def parse_model_name(text: str) -> ModelName:
    """Return what `text` names: a path, or a repository with or without :<file>.

    Raises ValueError if it looks like a path and does not exist, or is not a repository.
    """
    path = Path(text).expanduser()
    if path.exists():
        return ModelName(text, path=path)
    if text.startswith(("/", "./", "../", "~")):
        raise ValueError(f"--hf-model-name={text}: this path does not exist")
    repository, _, file = text.partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository, flags=re.ASCII):
        raise ValueError(
            f"--hf-model-name={text} is neither an existing path nor a repository such as gpt2, "
            "facebook/opt-125m or nvidia/nemo-megatron-gpt-1.3B:nemo_gpt1.3B_fp16.nemo"
        )
    return ModelName(text, repository=repository, file=file or None)


def prepare_weights(
    name: ModelName, request: ConversionRequest, *, stored_type: str | None = None
) -> Path:
    """Return the folder of a model's weights, downloaded and converted if they are not there.

    Weights that are there already have `stored_type`, if it is given. Raises ValueError with every
    reason why they are unavailable.
    """
    path, ft_dir = name.path, request.folder
    if path is not None and (path / "config.ini").is_file():
        return _checked(path, request.tp_size, stored_type)  # converted already
    if path is None and ft_dir.is_dir() and not request.overwrite:
        return _checked(ft_dir, request.tp_size, stored_type)  # needs no network
    source = path or _download(name, ft_dir)
    request = replace(request, checkpoint_path=source, names=_OPTION_NAMES)
    if problems := check_conversion(request):
        raise CheckpointMismatchError(problems)
    summary = convert(request, progress=ProgressLine())
    for remark in summary.remarks:
        logger.warning("%s", remark)
    return summary.ft_dir


def _checked(ft_dir: Path, tp_size: int, stored_type: str | None) -> Path:
    _, config = read_config(ft_dir)
    problems = []
    if config.tensor_para_size not in (None, tp_size):
        problems.append(
            f"{ft_dir} is cut for {config.tensor_para_size} ranks, not for --tp={tp_size}"
        )
    if stored_type not in (None, config.weight_data_type):
        problems.append(
            f"{ft_dir} holds {config.weight_data_type} weights, not --weight-data-type="
            f"{stored_type}; leave that out, or convert again with --overwrite"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return ft_dir


def _download(name: ModelName, ft_dir: Path) -> Path:
    """Return the downloaded checkpoint, or the copy that an earlier download left.

    Raises ValueError, which names the alternative.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ValueError(_no_download(name, ft_dir, "huggingface_hub is not installed")) from error
    try:
        info = huggingface_hub.HfApi().model_info(name.repository)
        files = wanted_files([each.rfilename for each in info.siblings or ()], name)
        folder = Path(huggingface_hub.snapshot_download(name.repository, allow_patterns=files))
    # Refusals, lost connections, offline mode: connection errors of some versions are not OSErrors.
    except (OSError, errors.HFValidationError, getattr(errors, "HTTPError", OSError)) as error:
        sought = name.file or "config.json"
        earlier = huggingface_hub.try_to_load_from_cache(name.repository, sought)
        if not isinstance(earlier, str):
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(_no_download(name, ft_dir, reason)) from error
        folder = Path(earlier).parents[len(Path(sought).parts) - 1]
        logger.warning("%s cannot be reached; the copy in %s is used", name.repository, folder)
    # The part of the repository to convert: an archive, or the folder.
    if name.file is not None and name.file.endswith(".nemo"):
        return folder / name.file
    archives = sorted(folder.glob("*.nemo"))
    is_archive = len(archives) == 1 and not (folder / "config.json").exists()
    return archives[0] if is_archive else folder


def _no_download(name: ModelName, ft_dir: Path, reason: str) -> str:
    return (
        f"--hf-model-name={name.text} is not a local path, is not converted ({ft_dir} does not "
        f"exist), and cannot be downloaded: {reason.rstrip('.')}. Without a network give the path "
        "of a checkpoint instead: a Hugging Face folder, a .nemo archive, or a <TP>-gpu folder"
    )


def wanted_files(names: Sequence[str], name: ModelName) -> list[str]:
    """Return the files of a repository that a conversion needs, of several formats one.

    Raises ValueError if there is nothing to convert, or several archives to choose from.
    """
    descriptions = [each for each in names if _DESCRIPTIONS.fullmatch(each)]
    if name.file is not None:
        if name.file not in names:
            raise ValueError(
                f"--hf-model-name={name.text}: {name.repository} has no file {name.file}; it has "
                f"{', '.join(sorted(names)) or 'none'}"
            )
        return [name.file, *(each for each in descriptions if each != name.file)]
    for pattern in _WEIGHTS:
        if weights := [each for each in names if pattern.fullmatch(each)]:
            return [*descriptions, *weights]
    archives = [each for each in names if each.endswith(".nemo")]
    if len(archives) == 1:
        return archives
    if archives:
        raise ValueError(
            f"--hf-model-name={name.text}: {name.repository} has several models; choose one with "
            f"--hf-model-name {name.repository}:<file>: {', '.join(sorted(archives))}"
        )
    raise ValueError(
        f"--hf-model-name={name.text}: {name.repository} holds neither .safetensors, "
        "pytorch_model*.bin nor .nemo files"
    )
