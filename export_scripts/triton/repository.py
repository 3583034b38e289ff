"""Assemble a Triton model repository around converted weights.

The weights are in `<repository>/<model>/1/<TP>-gpu`; everything else is written here. A model's
config.pbtxt is written last and atomically: without it the server ignores the folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from export_scripts.families import FAMILIES
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.files.replace import replace_file
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.tokenizer_files import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CHOICES,
    TOKENIZER_KINDS,
    find_tokenizer,
)
from export_scripts.ft.validation import manifest_problems
from export_scripts.suggest import did_you_mean
from export_scripts.triton.model_config import TritonModelConfig
from export_scripts.triton.model_folders import (
    ENGINES,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    RESERVED_NAMES,
    TEXT_ENCODER,
    TOKENIZER,
    VERSION,
    RepositoryRequest,
    end_id,
    is_generative,
    served_model,
    served_type,
    takes_text,
    text_models,
)
from export_scripts.triton.parameters import parameter_problems
from export_scripts.triton.signature import MODEL_SIGNATURES

__all__ = ["ENSEMBLE", "RepositoryRequest", "build_repository", "check_repository"]

DATA_TYPES = ("fp32", "fp16", "bf16")
CONFIG_FILE = "config.pbtxt"
_INTERACTIVE_NEEDS = {"max_batch_size": 1, "max_queue_delay_us": None}
# Per engine, the model types that keep sessions.
_INTERACTIVE_TYPES = {
    "pytorch": ("GPT", "GPT-J", "GPT-NeoX", "Llama"),
    "fastertransformer": ("GPT",),
}
_ALSO_SERVED_AS = {"T5": ("T5-Encoder",)}
_NO_INT8 = "is not supported for BERT by engine=pytorch; use 0."
_NO_END = (
    "{}/config.ini does not say which token ends a text; add eos_token_id to [encoder], or build "
    "without the text models."
)
_NO_TOKENIZER = (
    f"{{}} holds no tokenizer ({TOKENIZER_CHOICES}), which the text models need; convert with one, "
    "or build without the ensemble."
)


def check_repository(
    request: RepositoryRequest, *, names: Mapping[str, str] | None = None, kind: str | None = None
) -> list[str]:
    """Return the problems of a request that are visible before the weights exist.

    `names` gives the configuration key of a field for the messages, `kind` is that of
    `repository_models`.
    """
    name = dict(names or {})

    def problem(key: str, expected: str) -> str:
        return f"{name.get(key, key)}={getattr(request, key)} {expected}"

    found = [
        problem(key, "must be at least 1.")
        for key in ("tp_size", "pp_size", "max_batch_size", "instance_count")
        if getattr(request, key) < 1
    ]
    for key, known in (("engine", tuple(ENGINES)), ("data_type", DATA_TYPES)):
        if getattr(request, key) not in known:
            found.append(problem(key, f"is unknown; use one of {', '.join(known)}."))
    for key, choices in (("int8_mode", (0, 1, 2)), ("enable_custom_all_reduce", (0, 1))):
        if int(getattr(request, key)) not in choices:
            found.append(problem(key, f"must be one of {', '.join(map(str, choices))}."))
    if request.model_dir.name in RESERVED_NAMES:
        found.append(
            problem("model_dir", f"ends in '{request.model_dir.name}', the name of a text model.")
        )
    if request.model_type is not None and request.model_type not in MODEL_SIGNATURES:
        hint = did_you_mean(request.model_type, MODEL_SIGNATURES)
        text = f"is unknown{hint}; use one of {', '.join(MODEL_SIGNATURES)}."
        found.append(problem("model_type", text))
    if request.engine == "pytorch":
        mode = int(request.int8_mode)
        if mode == 2:
            found.append(problem("int8_mode", "needs engine=fastertransformer; use 0 or 1."))
        if mode == 1 and "bert" in (request.model_type, kind):
            found.append(problem("int8_mode", _NO_INT8))
        section = f"{name['parameters']}." if "parameters" in name else "parameter "
        found += [
            f"{section}{each}={request.parameters[each]} {text}"
            for each, text in parameter_problems(request.parameters).items()
        ]
    if request.interactive:
        found += [
            problem(key, f"must be {needed} for an interactive model.")
            for key, needed in _INTERACTIVE_NEEDS.items()
            if getattr(request, key) != needed
        ]
    return found


def build_repository(request: RepositoryRequest) -> list[Path]:
    """Write the repository's models and return their folders, the ensemble last.

    Files with the same bytes are left alone; rebuilding changes nothing. The weights are read
    once, to compare them with the checksums of their manifest.

    Raises:
        ValueError: the request or the weights do not fit (every problem is listed), or a folder
            holds another configuration and `overwrite` is off.
        CheckpointMismatchError: the weights' config.ini is missing or unreadable.
    """
    problems = check_repository(request)
    family, config = read_config(request.weights_dir)
    problems += _weight_problems(request, family, config)
    problems += [
        f"{request.weights_dir} is damaged: {each}; convert it again with overwrite=true"
        for each in manifest_problems(request.weights_dir, checksums=True).values()
    ]
    model_type = served_type(request, family)
    tokenizer = None
    if request.ensemble and takes_text(model_type):
        tokenizer = find_tokenizer(request.weights_dir)
        problems += [] if tokenizer else [_NO_TOKENIZER.format(request.weights_dir)]
        problems += [] if end_id(config) is not None else [_NO_END.format(request.weights_dir)]
    if problems:
        raise ValueError("\n".join(problems))
    models = [served_model(request, model_type)]
    if tokenizer is not None:
        models += text_models(request, models[0].signature, model_type, config, tokenizer)
    if not request.overwrite and (differing := _differing(request, models)):
        raise ValueError("\n".join(differing))
    return [_write_model(request.model_dir.parent, model) for model in models]


def repository_models(request: RepositoryRequest, *, kind: str | None = None) -> list[Path]:
    """Return the folders of the models that a request makes, before its weights exist.

    Args:
        request: What is built.
        kind: Name of the family (t5_encoder, bert, ...) or of a group of them (gpt3, mt5); the
            request's model_type takes precedence. None stands for a generator.
    """
    family = FAMILIES.get(kind or "")
    model_type = request.model_type or (family.model_type if family else "")
    names = [request.model_dir.name]
    if request.ensemble and takes_text(model_type):
        around = (PREPROCESSING, POSTPROCESSING, ENSEMBLE)
        names += around if is_generative(model_type) else (TOKENIZER, TEXT_ENCODER)
    return [request.model_dir.parent / name for name in names]


def _weight_problems(
    request: RepositoryRequest, family: ModelFamily, config: FTConfig
) -> list[str]:
    found = []
    if config.tensor_para_size != request.tp_size:
        found.append(
            f"{request.weights_dir} is for {config.tensor_para_size} tensor-parallel ranks, "
            f"but tp_size={request.tp_size} is requested."
        )
    if request.engine == "fastertransformer" and not family.ft_backend:
        found.append(
            f"engine=fastertransformer cannot serve a {family.name} model; use engine=pytorch."
        )
    if request.engine == "fastertransformer":
        found += [
            f"engine=fastertransformer cannot serve this model: {reason}; use engine=pytorch."
            for reason in config.ft_limits()
        ]
    model_type = served_type(request, family)
    if model_type not in (family.model_type, *_ALSO_SERVED_AS.get(family.model_type, ())):
        found.append(f"model_type={model_type}, but {request.weights_dir} holds {family.name}.")
    if request.engine == "pytorch" and int(request.int8_mode) and model_type == "bert":
        found.append(f"int8_mode={request.int8_mode} {_NO_INT8}")
    if request.decoupled and not is_generative(model_type):
        found.append(f"decoupled=True, but a {model_type} model does not stream.")
    keeping = _INTERACTIVE_TYPES.get(request.engine, ())
    if request.interactive and model_type not in keeping:
        found.append(
            f"interactive=True, but engine={request.engine} keeps no sessions with a {model_type} "
            f"model; it does with {', '.join(keeping)}."
        )
    if request.answer_only and request.decoupled and model_type in ("GPT-J", "GPT-NeoX"):
        found.append(
            f"answer_only=True cannot be streamed with a {model_type} model, which does not report "
            "where the answer starts."
        )
    if request.ensemble and request.parameters.get("stream_new_tokens", "0") != "0":
        found.append(
            "stream_new_tokens leaves out what the ensemble's text is made of; build without the "
            "ensemble."
        )
    return found


def _differing(request: RepositoryRequest, models: Sequence[TritonModelConfig]) -> list[str]:
    paths = {request.model_dir.parent / each.name / CONFIG_FILE: each for each in models}
    return [
        f"{path} exists with another configuration; set overwrite=true to replace it, or choose "
        "another folder."
        for path, model in paths.items()
        if path.exists() and path.read_bytes() != model.to_text().encode()
    ]


def _write_model(repository: Path, model: TritonModelConfig) -> Path:
    folder = repository / model.name
    version = folder / VERSION
    version.mkdir(parents=True, exist_ok=True)
    text = model.to_text().encode()
    config_path = folder / CONFIG_FILE
    wanted = {version / name: content for name, content in model.files.items()}
    if config_path.exists() and config_path.read_bytes() != text:
        config_path.unlink()  # hides the model while its parts change
    # What an earlier build may have left.
    named = (pattern for kinds in TOKENIZER_KINDS.values() for pattern in kinds)
    patterns = ("model.py", SETTINGS_FILE, TEMPLATE_FILE, *named)
    for stale in {path for each in patterns for path in version.glob(each)} - set(wanted):
        stale.unlink()
    for path, content in wanted.items():
        _write_whole(path, content)
    _write_whole(config_path, text)
    return folder


def _write_whole(path: Path, content: bytes) -> None:
    """Give `path` this content in one step; a file that has it already is not touched."""
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)
