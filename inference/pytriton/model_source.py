"""From the name of a model to its weights: a local path or a download, converted if needed."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from export_scripts.conversion.request import OPTION_NAMES
from export_scripts.ft.config_ini import read_config
from foundations.commands import ProgressLine
from foundations.errors import CheckpointMismatchError

logger = logging.getLogger(__name__)

# This command's option for each field that the converter's messages name.
_OPTION_NAMES = {
    **OPTION_NAMES,
    "checkpoint_path": "--hf-model-name",
    "output_dir": "--output-dir",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "weight_data_type": "--weight-data-type",
    "overwrite": "--overwrite",
}
# Files to download: descriptions, and weights in the first format that the repository has.
_DESCRIPTIONS = ("*.json", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelName:
    """The model that the user names: a local path, or a repository on the Hub."""

    text: str
    path: Path | None = None
    repository: str = ""
    file: str | None = None  # a single file of the repository; None: find the weights

    @property
    def key(self) -> str:
        """Name of the served model and of its folder."""
        name = self.text if self.path is None else self.path.resolve().name
        return re.sub(r"\W", "_", name, flags=re.ASCII)


def parse_model_name(text: str) -> ModelName:
    """Parse a path or repository[:file].

    Raises ValueError for a path that does not exist, and for what is not a repository's name.
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
    """Return the folder of a model's weights, downloading and converting them if needed.

    Existing converted weights must have `stored_type`, if it is given. Raises ValueError, which
    names every reason why they are unavailable.
    """
    path, ft_dir = name.path, request.folder
    if path is not None and (path / "config.ini").is_file():
        return _checked(path, request.tp_size, stored_type)  # converted already
    if path is None and ft_dir.is_dir() and not request.overwrite:
        return _checked(ft_dir, request.tp_size, stored_type)  # without network access
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
            f"{ft_dir} is split for {config.tensor_para_size} ranks, not for --tp={tp_size}"
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
    """Download what to convert: the repository's folder, or a single file.

    Without a network the library finds earlier downloads. Raises ValueError, which names the
    alternative.
    """
    reason = "it has neither .safetensors nor pytorch_model*.bin; name one of its files, as in "
    reason += f"{name.repository}:<file>"
    try:
        from huggingface_hub import snapshot_download

        for pattern in _WEIGHTS if name.file is None else (name.file,):
            wanted = [*_DESCRIPTIONS, pattern]
            folder = Path(snapshot_download(name.repository, allow_patterns=wanted))
            if name.file is not None and name.file.endswith(".nemo"):
                return folder / name.file
            if any(folder.glob(pattern)):
                return folder
    except ImportError:
        reason = "huggingface_hub is not installed"
    except Exception as error:  # HTTP errors, lost connections, no network: no common base class
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise ValueError(
        f"--hf-model-name={name.text} is not a local path, is not converted ({ft_dir} does not "
        f"exist), and cannot be downloaded: {reason.rstrip('.')}. Without a network give the path "
        "of a checkpoint instead: a Hugging Face folder, a .nemo archive, or a <TP>-gpu folder"
    )
