"""Assembly of a Triton model repository around converted weights.

The weights are in `<repository>/<model>/1/<TP>-gpu`; everything else is written here. A model's
config.pbtxt is written last and atomically: without it, the server ignores the folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.generation import GENERATION_FILE
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.generation_file import all_end_tokens
from export_scripts.ft.layout import ft_directory
from export_scripts.ft.tokenizer_files import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CHOICES,
    TOKENIZER_KINDS,
    TokenizerFiles,
    find_tokenizer,
)
from export_scripts.ft.validation import manifest_problems
from export_scripts.triton import signature
from export_scripts.triton.model_config import (
    TritonModelConfig,
    ensemble_steps,
    text_encoder_steps,
)
from export_scripts.triton.parameters import FIELDS, PARAMETERS, parameter_problems
from export_scripts.triton.signature import ENCODERS, MODEL_SIGNATURES, ModelSignature
from foundations.files.replace import replace_file
from foundations.suggest import did_you_mean

ENGINES = {"pytorch": "python", "fastertransformer": "fastertransformer"}  # -> Triton backend
DATA_TYPES = ("fp32", "fp16", "bf16")
CONFIG_FILE = "config.pbtxt"
ENSEMBLE = "ensemble"
_PREPROCESSING, _POSTPROCESSING = "preprocessing", "postprocessing"
_TOKENIZER, TEXT_ENCODER = "tokenizer", "text_encoder"
# Models other than the one that takes token IDs.
TEXT_MODELS = (_PREPROCESSING, _POSTPROCESSING, ENSEMBLE, _TOKENIZER, TEXT_ENCODER)
_VERSION = "1"
_INTERACTIVE_NEEDS = {"max_batch_size": 1, "max_queue_delay_us": None}
# Engine -> model types that can have sessions.
_INTERACTIVE_TYPES = {
    "pytorch": ("GPT", "GPT-J", "GPT-NeoX", "Llama"),
    "fastertransformer": ("GPT",),
}
_ALSO_SERVED_AS = {"T5": ("T5-Encoder",)}
_ENCODER_DECODERS = ("T5",)
# Kinds of tokenizers whose files cannot state that a text ends with the end token.
_PLAIN_TOKENIZERS = ("bpe", "sentencepiece", "wordpiece")
# Script of the Python backend -> (what it does, module, class).
_SCRIPTS = {
    "generation": ("Generates tokens", "python_backend", "GenerationModel"),
    "encoder": ("Turns tokens into hidden states", "encoder_backend", "EncoderModel"),
    _PREPROCESSING: ("Turns text into tokens", "text_models", "Preprocessing"),
    _POSTPROCESSING: ("Turns tokens into text", "text_models", "Postprocessing"),
    _TOKENIZER: ("Turns text into tokens", "text_models", "QueryTokenizer"),
}
_KEEP = b"An object store has no empty folders: this file makes version 1 exist there.\n"
_NO_END = (
    "{}/config.ini does not say which token ends a text; add eos_token_id to [encoder], or build "
    "without the text models."
)
_NO_TOKENIZER = (
    f"{{}} holds no tokenizer ({TOKENIZER_CHOICES}), which the text models need; convert with one, "
    "or build without the ensemble."
)


@dataclass(frozen=True)
class RepositoryRequest:
    """A request for a Triton repository.

    `model_dir` is `<repository>/<model name>`, with the weights at `model_dir/1/<tp_size>-gpu`.
    `max_queue_delay_us` turns the server's batcher on; the C++ backend only batches with it, our
    engine always does. A portable repository has no absolute path. `parameters` are further entries
    of the model's config.pbtxt. The only `model_type` that may differ from the weights' is
    T5-Encoder, for the encoder of a whole T5.
    """

    model_dir: Path
    tp_size: int
    pp_size: int
    max_batch_size: int
    data_type: str
    int8_mode: int = 0
    enable_custom_all_reduce: int = 0
    engine: str = "pytorch"
    decoupled: bool = False
    ensemble: bool = True
    overwrite: bool = False
    portable: bool = True
    interactive: bool = False
    answer_only: bool = False
    max_queue_delay_us: int | None = None
    instance_count: int = 1
    model_type: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights_dir(self) -> Path:
        """The folder of the converted weights."""
        return ft_directory(self.model_dir / _VERSION, self.tp_size)

    def has_text_models(self, model_type: str) -> bool:
        """Return whether the repository has text models around a model of this type."""
        return self.ensemble and model_type != "bert"


def is_generative(model_type: str) -> bool:
    """Return whether a model of this type generates tokens."""
    return model_type not in ENCODERS


def check_repository(
    request: RepositoryRequest, *, names: Mapping[str, str] | None = None, kind: str | None = None
) -> list[str]:
    """Return the problems of a request that can be known before the weights exist.

    `names` maps a field to its configuration key in messages; `kind` is as in `repository_models`.
    """
    name = dict(names or {})

    def problem(key: str, expected: str) -> str:
        return f"{name.get(key, key)}={getattr(request, key)} {expected}"

    found = [
        problem(key, "must be at least 1.")
        for key in ("max_batch_size", "instance_count")
        if getattr(request, key) < 1
    ]
    if request.engine not in ENGINES:
        found.append(problem("engine", f"has no Triton model; use one of {', '.join(ENGINES)}."))
    values = _parameters_of(request)
    found += [
        problem(FIELDS.get(key, key), f"{expected}.")
        for key, text in values.items()
        if (expected := PARAMETERS[key].kind.problem(text))
    ]
    if request.model_dir.name in TEXT_MODELS:
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
            text = "is not supported for BERT by engine=pytorch; use 0."
            found.append(problem("int8_mode", text))
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


def _parameters_of(request: RepositoryRequest) -> dict[str, str]:
    """Return the parameters of config.pbtxt that are fields of a request."""
    names = (
        "tensor_para_size", "pipeline_para_size", "data_type", "int8_mode",
        "enable_custom_all_reduce",
    )  # fmt: skip
    values = {name: getattr(request, FIELDS.get(name, name)) for name in names}
    return {name: str(int(v)) if isinstance(v, bool) else str(v) for name, v in values.items()}


def repository_models(request: RepositoryRequest, *, kind: str | None = None) -> list[Path]:
    """Return the folders of the models that a request builds, before its weights exist.

    `kind` is a family (t5_encoder, bert, ...) or a group of families (gpt3, mt5); the request's
    model_type takes precedence. None means a model that generates tokens.
    """
    from export_scripts.families.table import FAMILIES  # not imported by a server

    family = FAMILIES.get(kind or "")
    model_type = request.model_type or (family.model_type if family else "")
    names = [request.model_dir.name]
    if request.has_text_models(model_type):
        around = (_PREPROCESSING, _POSTPROCESSING, ENSEMBLE)
        names += around if is_generative(model_type) else (_TOKENIZER, TEXT_ENCODER)
    return [request.model_dir.parent / name for name in names]


def build_repository(request: RepositoryRequest) -> list[Path]:
    """Write the repository's models and return their folders, the ensemble last.

    Files that already have the content are not touched, so rebuilding changes nothing. The weights
    are read once, to check the checksums of their manifest.

    Raises:
        ValueError: The request or the weights are wrong (every problem is listed), or a folder
            holds another configuration and `overwrite` is off.
        CheckpointMismatchError: The weights' config.ini is missing or unreadable.
    """
    family, config = read_config(request.weights_dir)
    problems = check_repository(request, kind=family.name)
    problems += _weight_problems(request, family, config)
    problems += [
        f"{request.weights_dir} is damaged: {each}; convert it again with overwrite=true"
        for each in manifest_problems(request.weights_dir, checksums=True).values()
    ]
    model_type = request.model_type or family.model_type
    tokenizer = None
    if request.has_text_models(model_type):
        tokenizer = find_tokenizer(request.weights_dir)
        problems += [] if tokenizer else [_NO_TOKENIZER.format(request.weights_dir)]
        problems += [] if _end_id(config) is not None else [_NO_END.format(request.weights_dir)]
    if problems:
        raise ValueError("\n".join(problems))
    models = [_served_model(request, model_type)]
    if tokenizer is not None:
        models += _text_models(request, models[0].signature, model_type, config, tokenizer)
    if not request.overwrite and (differing := _conflicts(request, models)):
        raise ValueError("\n".join(differing))
    return [write_model(request.model_dir.parent, model) for model in models]


def _weight_problems(
    request: RepositoryRequest, family: ModelFamily, config: FTConfig
) -> list[str]:
    model_type, engine = request.model_type or family.model_type, request.engine
    is_ft = engine == "fastertransformer"
    with_sessions = _INTERACTIVE_TYPES.get(engine, ())
    served_as = (family.model_type, *_ALSO_SERVED_AS.get(family.model_type, ()))
    texts = request.parameters.get("stream_new_tokens", "0") != "0"
    checks = {
        f"{request.weights_dir} is for {config.tensor_para_size} tensor-parallel ranks, but "
        f"tp_size={request.tp_size} is requested.": config.tensor_para_size != request.tp_size,
        f"engine=fastertransformer cannot serve a {family.name} model; use engine=pytorch.": (
            is_ft and not family.ft_backend
        ),
        f"model_type={model_type}, but {request.weights_dir} holds {family.name}.": (
            model_type not in served_as
        ),
        f"decoupled=True, but a {model_type} model does not stream.": (
            request.decoupled and not is_generative(model_type)
        ),
        f"interactive=True, but engine={engine} keeps no sessions with a {model_type} model; it "
        f"does with {', '.join(with_sessions)}.": (
            request.interactive and model_type not in with_sessions
        ),
        f"answer_only=True cannot be streamed with a {model_type} model, which does not report "
        "where the answer starts.": (
            request.answer_only and request.decoupled and model_type in ("GPT-J", "GPT-NeoX")
        ),
        "stream_new_tokens leaves out what the ensemble's text is made of; build without the "
        "ensemble.": request.ensemble and texts,
    }
    return [
        *(text for text, applies in checks.items() if applies),
        *(
            f"engine=fastertransformer cannot serve this model: {reason}; use engine=pytorch."
            for reason in (config.ft_limits() if is_ft else ())
        ),
    ]


def _served_model(request: RepositoryRequest, model_type: str) -> TritonModelConfig:
    """Return the model that runs the weights."""
    tensors = signature.model_signature(model_type, data_type=request.data_type)
    is_python = request.engine == "pytorch"
    if not is_python:
        tensors = signature.as_sent_by_fastertransformer(tensors, model_type)
    elif is_generative(model_type):
        tensors += signature.CHOICES
    if request.interactive:
        tensors = signature.interactive(tensors)
    elif is_python and is_generative(model_type) and model_type not in _ENCODER_DECODERS:
        tensors += signature.SCORES
    # The C++ backend appends a BERT's file names to the folder without a slash.
    end = "/" if model_type == "bert" and not is_python else ""
    parameters = {**_parameters_of(request), "model_type": model_type}
    if model_type == "bert":
        parameters |= {"is_sparse": "0", "is_remove_padding": str(int(is_python))}
    if not request.portable:
        parameters["model_checkpoint_path"] = f"{request.weights_dir.resolve()}{end}"
    kind = "generation" if is_generative(model_type) else "encoder"
    return TritonModelConfig(
        name=request.model_dir.name,
        backend=ENGINES[request.engine],
        max_batch_size=request.max_batch_size,
        signature=tensors,
        parameters=parameters | dict(request.parameters),
        # Triton's Python backend would take this for its script's name. If it is empty, the folder
        # of the weights is <tensor_para_size>-gpu.
        default_model_filename="" if is_python else f"{request.weights_dir.name}{end}",
        decoupled=request.decoupled,
        max_queue_delay_us=request.max_queue_delay_us,
        interactive=request.interactive,
        instance_count=request.instance_count,
        files=_script(kind) if is_python else {},
    )


def _script(model: str) -> dict[str, bytes]:
    does, module, name = _SCRIPTS[model]
    text = (
        f'"""{does}; what the server runs is inference.backend.{module}."""\n\n'
        f"from inference.backend.{module} import {name} as TritonPythonModel  # noqa: F401\n"
    )
    return {"model.py": text.encode()}


def _text_models(
    request: RepositoryRequest,
    model: ModelSignature,
    model_type: str,
    config: FTConfig,
    files: TokenizerFiles,
) -> list[TritonModelConfig]:
    """Return the models that convert between text and tokens, and the ensemble."""
    start_id = _token_id(config, "start_id", "decoder_start_token_id")
    tokens = {
        "start_id": start_id,
        "end_id": _end_id(config),
        "end_ids": _end_ids(request, config),
    }
    common = {
        "tokenizer_type": files.kind,
        "tokenizer_path": ".",
        **{name: str(token) for name, token in tokens.items() if token is not None},
        **({"interactive": "1"} if request.interactive else {}),
    }
    name = request.model_dir.name
    has_encoder = model_type in (*ENCODERS, *_ENCODER_DECODERS)
    append_end = int(has_encoder and files.kind in _PLAIN_TOKENIZERS)
    before = {"append_end_id": str(append_end)}
    if is_generative(model_type):
        after = {
            "answer_only": str(int(request.answer_only)),
            "output_holds_prompt": str(int(not has_encoder)),
            "streaming": str(int(request.decoupled)),
            "strict_lengths": request.parameters.get("strict_lengths", "0"),
        }
        parts = {
            _PREPROCESSING: (signature.PREPROCESSING, before),
            _POSTPROCESSING: (signature.postprocessing(model), after),
        }
        around, outer = ENSEMBLE, signature.ensemble(model, has_sessions=request.interactive)
        steps = ensemble_steps(model, model_name=name, decoupled=request.decoupled)
    else:
        parts = {_TOKENIZER: (signature.TOKENIZER, before)}
        around, outer = TEXT_ENCODER, signature.text_encoder(model)
        steps = text_encoder_steps(model, model_name=name)
    tokenizer = {path.name: path.read_bytes() for path in files.all_files}
    return [
        *(
            TritonModelConfig(
                name=part,
                backend="python",
                max_batch_size=request.max_batch_size,
                signature=signature.with_leading_axis(tensors) if request.interactive else tensors,
                parameters={**common, **more},
                files=tokenizer | _script(part),
            )
            for part, (tensors, more) in parts.items()
        ),
        TritonModelConfig(
            name=around,
            backend="ensemble",
            max_batch_size=request.max_batch_size,
            signature=outer,
            decoupled=request.decoupled,
            steps=steps,
            files={"README": _KEEP},
        ),
    ]


def _end_id(config: FTConfig) -> int | None:
    """Return the token that ends a text; None if config.ini does not state it."""
    return _token_id(config, "end_id", "eos_token_id")


def _end_ids(request: RepositoryRequest, config: FTConfig) -> str | None:
    """Return the tokens that end a text; None if only end_id does. Raises ValueError."""
    end_id = _end_id(config)
    assert end_id is not None, "text models need an end token"
    ends = all_end_tokens(request.weights_dir, end_id)
    own = ",".join(map(str, ends)) if len(ends) > 1 else None
    return request.parameters.get("end_ids", own)


def _token_id(config: FTConfig, *names: str) -> int | None:
    """Return the first field that the config has; families name it differently."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def _conflicts(request: RepositoryRequest, models: Sequence[TritonModelConfig]) -> list[str]:
    paths = {request.model_dir.parent / each.name / CONFIG_FILE: each for each in models}
    return [
        f"{path} exists with another configuration; set overwrite=true to replace it, or choose "
        "another folder."
        for path, model in paths.items()
        if path.exists() and path.read_bytes() != model.to_text().encode()
    ]


def write_model(repository: Path, model: TritonModelConfig) -> Path:
    """Write the folder of a model and return it; the configuration is written last."""
    folder = repository / model.name
    version = folder / _VERSION
    version.mkdir(parents=True, exist_ok=True)
    text = model.to_text().encode()
    config_path = folder / CONFIG_FILE
    wanted = {version / name: content for name, content in model.files.items()}
    if config_path.exists() and config_path.read_bytes() != text:
        config_path.unlink()  # hides the model while its files change
    # Deletes files of an earlier build.
    named = (pattern for kinds in TOKENIZER_KINDS.values() for pattern in kinds)
    patterns = ("model.py", SETTINGS_FILE, TEMPLATE_FILE, GENERATION_FILE, *named)
    for stale in {path for each in patterns for path in version.glob(each)} - set(wanted):
        stale.unlink()
    for path, content in wanted.items():
        _write_whole(path, content)
    _write_whole(config_path, text)
    return folder


def _write_whole(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically; a file that has it already is not touched."""
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)
