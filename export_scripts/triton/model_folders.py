"""The models of a repository by its request: configuration and files of each version folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.ft.layout import ft_directory
from export_scripts.ft.tokenizer_files import TokenizerFiles
from export_scripts.triton import signature
from export_scripts.triton.model_config import (
    TritonModelConfig,
    ensemble_steps,
    text_encoder_steps,
)
from export_scripts.triton.signature import ModelSignature

VERSION = "1"
PREPROCESSING, POSTPROCESSING, ENSEMBLE = "preprocessing", "postprocessing", "ensemble"
TOKENIZER, TEXT_ENCODER = "tokenizer", "text_encoder"
RESERVED_NAMES = (PREPROCESSING, POSTPROCESSING, ENSEMBLE, TOKENIZER, TEXT_ENCODER)
ENGINES = {"pytorch": "python", "fastertransformer": "fastertransformer"}  # -> Triton backend

_SCRIPTS = Path(__file__).parent / "models"
_SCRIPT = "model.py"
_KEEP = b"An object store has no empty folders: this file makes version 1 exist there.\n"
_ENCODER_DECODERS = ("T5",)
# Tokenizers whose files do not state that a text ends with the end token.
_PLAIN_TOKENIZERS = ("bpe", "sentencepiece", "wordpiece")


@dataclass(frozen=True)
class RepositoryRequest:
    """The request for a Triton repository.

    `model_dir` is `<repository>/<model name>`, with the weights at `model_dir/1/<tp_size>-gpu`.
    `max_queue_delay_us` switches the server's batcher on; the C++ backend batches only with it,
    our engine always does. A portable repository holds no absolute path. `parameters` are
    further entries for the model's config.pbtxt. `model_type` other than that of the weights can be
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
        """Folder of the converted weights."""
        return ft_directory(self.model_dir / VERSION, self.tp_size)


def served_type(request: RepositoryRequest, family: ModelFamily) -> str:
    """Return the model_type that config.pbtxt names."""
    return request.model_type or family.model_type


def takes_text(model_type: str) -> bool:
    """Return whether a model of this type can have text models around it."""
    return model_type != "bert"


def is_generative(model_type: str) -> bool:
    """Return whether a model of this type generates tokens."""
    return model_type not in signature.ENCODERS


def served_model(request: RepositoryRequest, model_type: str) -> TritonModelConfig:
    """Return the model that runs the weights."""
    tensors = signature.model_signature(model_type, data_type=request.data_type)
    is_python = request.engine == "pytorch"
    if not is_python:
        tensors = signature.as_sent_by_fastertransformer(tensors, model_type)
    elif is_generative(model_type):
        tensors += signature.BIASES
    if request.interactive:
        tensors = signature.interactive(tensors)
    elif is_python and is_generative(model_type) and model_type not in _ENCODER_DECODERS:
        tensors += signature.SCORES
    # The C++ backend joins a BERT's file names to its folder without a slash.
    end = "/" if model_type == "bert" and not is_python else ""
    parameters = {
        "tensor_para_size": str(request.tp_size),
        "pipeline_para_size": str(request.pp_size),
        "data_type": request.data_type,
        "model_type": model_type,
        "int8_mode": str(int(request.int8_mode)),
        "enable_custom_all_reduce": str(int(request.enable_custom_all_reduce)),
    }
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
        # Triton's Python backend takes this for its script's name; the folder is found by the
        # rule for an empty name: <tensor_para_size>-gpu.
        default_model_filename="" if is_python else f"{request.weights_dir.name}{end}",
        decoupled=request.decoupled,
        max_queue_delay_us=request.max_queue_delay_us,
        interactive=request.interactive,
        instance_count=request.instance_count,
        files=_script(kind) if is_python else {},
    )


def _script(model: str) -> dict[str, bytes]:
    return {_SCRIPT: (_SCRIPTS / model / _SCRIPT).read_bytes()}


def text_models(
    request: RepositoryRequest,
    model: ModelSignature,
    model_type: str,
    config: FTConfig,
    files: TokenizerFiles,
) -> list[TritonModelConfig]:
    """Return the models between text and tokens, and the ensemble of all, which takes text."""
    start_id = _token_id(config, "start_id", "decoder_start_token_id")
    tokens = {"start_id": start_id, "end_id": end_id(config)}
    common = {
        "tokenizer_type": files.kind,
        "tokenizer_path": ".",
        **{name: str(token) for name, token in tokens.items() if token is not None},
        **({"interactive": "1"} if request.interactive else {}),
    }
    name = request.model_dir.name
    has_encoder = model_type in (*signature.ENCODERS, *_ENCODER_DECODERS)
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
            PREPROCESSING: (signature.PREPROCESSING, before),
            POSTPROCESSING: (signature.postprocessing(model), after),
        }
        around, outer = ENSEMBLE, signature.ensemble(model, keeps_sessions=request.interactive)
        steps = ensemble_steps(model, model_name=name, decoupled=request.decoupled)
    else:
        parts = {TOKENIZER: (signature.TOKENIZER, before)}
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


def end_id(config: FTConfig) -> int | None:
    """Return the token that ends a text, None where config.ini does not say."""
    return _token_id(config, "end_id", "eos_token_id")


def _token_id(config: FTConfig, *names: str) -> int | None:
    """Return the first of the fields, by the names of several families, that the config has."""
    found: int | None = next(getattr(config, name) for name in names if hasattr(config, name))
    return found
