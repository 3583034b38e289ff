"""A source's model configuration: required keys, aliases, and refused values.

Problems are collected and raised together. Absent keys have the defaults of the library that wrote
the file.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.checkpoints.base import json_file
from export_scripts.checkpoints.tokenizers import special_ids
from export_scripts.families.layout.config import MAX_LAYERS, ConfigT, FTConfig
from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from export_scripts.families.mapping.prompts import prompt_fields
from export_scripts.families.mapping.source_mapping import Facts
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Table

REQUIRED = object()  # as a default: the key must be set

_MAX_NAME_BYTES = 120
_MAX_INT = (1 << 31) - 1  # FT and the tokenizers count in 32 bits
# Key of a special token -> attribute of a config with the token that is used.
_TOKENS = {
    "bos_token_id": "start_id",
    "decoder_start_token_id": "start_id",
    "eos_token_id": "end_id",
    "pad_token_id": "pad_id",
}

_ADDED_TOKENS = ("tokenizer.json", "tokenizer_config.json")
# Hugging Face's name of an activation -> (spelling in config.ini, whether gelu is by erf).
# transformers, activations.py
HUGGINGFACE_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), ("Gelu", True)),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh"),
        ("Gelu", False),
    ),
    "relu": ("Relu", False),
    **dict.fromkeys(("silu", "swish"), ("Silu", False)),
}
# Includes activations that FasterTransformer does not know.
ALL_ACTIVATIONS = {**HUGGINGFACE_ACTIVATIONS, "relu2": ("Relu2", False)}


@dataclass
class Settings:
    """A source's configuration, and the problems found while reading it."""

    source: Table  # as its library wrote it
    label: str = "config.json"  # its name in messages
    problems: list[str] = field(default_factory=list)  # found so far

    def note(self, problem: str) -> None:
        """Add a problem with a key."""
        self.problems.append(f"{self.label}: {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as it is stated."""
        return self.source.get(name, default)

    def value(self, *names: str, default: Any = REQUIRED) -> Any:
        """Return the value of the first spelling that is set; null counts as not set."""
        found = [name for name in names if self.get(name) is not None]
        if not found:
            if default is REQUIRED:
                self.problems.append(f"{self.label} has no {' or '.join(names)}")
                return None
            return default
        first, *others = found
        value = self.source[first]
        self.problems += [
            f"{self.label}: {first} = {value!r} but {name} = {self.source[name]!r}, two "
            "spellings of one setting: expected the same value; remove the wrong one"
            for name in others
            if self.source[name] != value
        ]
        return value

    def integer(self, *names: str, default: Any = REQUIRED, least: int = 1) -> int:
        """Return an integer of at least `least`, or 1 after noting a problem.

        A number of layers is limited, before anything is allocated for each.
        """
        value = self.value(*names, default=default)
        if value is None:
            return 1
        most = MAX_LAYERS if names[0].endswith(("_layer", "_layers")) else _MAX_INT
        if type(value) is not int or not least <= value <= most:
            self.note(
                f"{names[0]} = {value!r:.100} is not a count; expected a whole "
                f"number from {least} to {most}"
            )
            return 1
        return value

    def natural(self, *names: str, default: Any = REQUIRED) -> int:
        """Return an integer of at least 0."""
        return self.integer(*names, default=default, least=0)

    def number(self, *names: str, default: Any = REQUIRED) -> float:
        """Return a number greater than 0, or 1.0 after noting a problem."""
        value = self.value(*names, default=default)
        if value is None:
            return 1.0
        if not _is_positive(value):
            self.note(f"{names[0]} = {value!r} is out of range; expected a number greater than 0")
            return 1.0
        return float(value)

    def optional(self, name: str, *, default: float | None = None) -> float | None:
        """Return a number greater than 0, unchanged, or None if null switches it off."""
        stated = self.source.get(name, default)
        if stated is None:
            return None
        number = self.number(name, default=default)
        return stated if stated == number else number

    def nonzero(self, *names: str) -> float | None:
        """Return the number of the first key that is set; null, 0 and false count as not set."""
        name = next(filter(self.get, names), None)
        return None if name is None else self.number(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers greater than 0."""
        value = self.value(name)
        entries = value if isinstance(value, (list, tuple)) else [None]
        if not all(_is_positive(each) for each in entries):
            self.note(f"{name} = {value!r}: expected a list of numbers greater than 0")
            return (1.0,)
        return tuple(map(float, entries))

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean; null, which some readers take for false, is refused."""
        value = self.source.get(name, default)
        if not isinstance(value, bool):
            self.note(f"{name} = {value!r} is neither true nor false")
            return default
        return value

    def activation(
        self,
        *names: str,
        default: str,
        known: Mapping[str, tuple[str, bool]] = HUGGINGFACE_ACTIVATIONS,
    ) -> tuple[str, bool]:
        """Return (spelling in config.ini, whether gelu is by erf)."""
        name = self.value(*names, default=default)
        if not isinstance(name, str) or name not in known:
            self.note(f"{names[0]} = {name} cannot be represented; known: {', '.join(known)}")
            return "Gelu", False
        return known[name]

    def any_activation(self, *names: str, default: str) -> tuple[str, bool]:
        """Return the same as `activation`, also for those that FasterTransformer does not know."""
        return self.activation(*names, default=default, known=ALL_ACTIVATIONS)

    def divide(self, total: int, parts: int, what: str) -> int:
        """Return total / parts, or 1 after noting a remainder as a problem."""
        if parts == 0 or total % parts:
            self.note(f"{what}: {total} does not divide by {parts}")
            return 1
        return total // parts

    def token_ids(
        self, facts: Facts, *, bos: int | None = None, eos: int | None = None
    ) -> tuple[int, int]:
        """Return (start_id, end_id); a model with only one uses it for both.

        Sources in order: the user, config.json with the library's defaults, generation_config.json,
        the tokenizer.
        """
        generation, known = _generation_config(facts), facts.special_ids()

        def token(name: str, ours: str, default: int | None, stated: int | None) -> int | None:
            values = self.source.get(name, default), generation.get(name)
            return facts.token(ours, *(self.token(name, value) for value in values), stated)

        start = token("bos_token_id", "start_id", bos, known.bos)
        end = token("eos_token_id", "end_id", eos, known.eos)
        start, end = (end if start is None else start), (start if end is None else end)
        if start is None or end is None:
            self.problems.append(
                f"{self.label} has neither bos_token_id nor eos_token_id, nor do "
                "tokenizer files: state --set start_id=.. --set end_id=.."
            )
            return 0, 0
        return start, end

    def token(self, name: str, value: Any) -> int | None:
        """Return a token ID, the first of a list (as of several end tokens).

        A negative ID counts as none.
        """
        if isinstance(value, list):
            value = next((each for each in value if not _is_negative(each)), None)
        if value is None or _is_negative(value):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value > _MAX_INT:
            self.note(f"{name} = {value!r} is not a token id")
            return None
        return value

    def build_config(self, config: Callable[..., ConfigT], facts: Facts, **fields: Any) -> ConfigT:
        """Return a config with the fields, and with those of the request and of added archives.

        Raises:
            CheckpointMismatchError: Problems were noted, or the config refuses the fields; all are
                listed.
        """
        fields["weight_data_type"] = facts.weight_data_type
        fields["tensor_para_size"] = facts.tp_size
        if facts.prompts:
            fields |= prompt_fields(facts, start_id=fields["vocab_size"])
        if facts.activation_ranges is not None:
            fields["int8"] = True
        try:
            result = config(**fields)
        except ValueError as error:
            for problem in str(error).split("\n"):
                self.note(problem)
        self.finish()
        return result

    def finish(self) -> None:
        """Raise the noted problems, each once even if several fields read the same setting.

        Raises:
            CheckpointMismatchError: Problems were noted.
        """
        if self.problems:
            raise CheckpointMismatchError(dict.fromkeys(self.problems))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < sys.float_info.max


def _is_negative(value: Any) -> bool:
    return isinstance(value, int) and value < 0


def _generation_config(facts: Facts) -> Table:
    """Return the content of generation_config.json, which has the token IDs in newer folders."""
    file = facts.tokenizer.get(GENERATION_FILE)
    return json_file(file) if file else {}


def generation_file(facts: Facts, config: FTConfig) -> dict[str, bytes]:
    """Return a generation_config.json for the folder if the source's lacks an end token.

    Generation ends at every token that the configurations and the tokenizer state (as in vLLM), or
    at the one that the user states.

    Raises:
        CheckpointMismatchError: A configuration states something other than tokens.
    """
    end_id, own = getattr(config, "end_id", None), _generation_config(facts)
    if end_id is None:
        return {}
    try:
        stated, found = end_tokens(own), end_tokens(facts.config, "config.json")
    except ValueError as error:
        raise CheckpointMismatchError([str(error)]) from None
    ends = dict.fromkeys((end_id, *found, *stated))
    parts = {name: file for name, file in facts.tokenizer.items() if name in _ADDED_TOKENS}
    if (token := special_ids(parts).eos) is not None:
        ends[token] = None
    if "end_id" in facts.given:
        ends = {end_id: None}
    if ends.keys() == {end_id, *stated}:
        return {}
    return {GENERATION_FILE: json.dumps({**own, "eos_token_id": list(ends)}, indent=2).encode()}


def model_name(source: Table, family: str) -> str:
    """Return the name for config.ini: the source's without folders, or the family's."""
    name = str(source.get("_name_or_path") or source.get("name_or_path") or "")
    name = name.rstrip("/").rsplit("/", 1)[-1]
    # config.ini allows a short line without special characters.
    name = "".join(each for each in name if each.isprintable() and each not in "%;")
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").strip() or family


def half_precision_warnings(facts: Facts, config: FTConfig) -> list[str]:
    """Return a warning if weights trained in bf16 are converted to fp16."""
    stated = str(facts.config.get("dtype") or facts.config.get("torch_dtype") or "")
    stored = {piece.dtype for pieces in facts.reader.tensors.values() for piece in pieces}
    if config.weight_data_type != "fp16" or not ("bfloat16" in stated or "bf16" in stored):
        return []
    return [
        "the model was trained in bf16, whose range fp16 lacks: activations can overflow in fp16 "
        "even if every weight fits; convert with weight_data_type bf16 or fp32 and serve with "
        "data_type bf16"
    ]


def source_warnings(facts: Facts, config: FTConfig) -> list[str]:
    """Return warnings about a source's custom code and about its special tokens.

    Some models state -1 for a token that they do not have.
    """
    source = facts.config
    warnings = []
    code = source.get("auto_map")
    if isinstance(code, Mapping):
        code = code.get("AutoModelForCausalLM") or code.get("AutoModel")
    if code:
        warnings.append(
            f"config.json: auto_map names custom code ({code}), which is not run: the model is "
            f"converted as transformers' {source.get('model_type')}; if the code computes "
            "something else, answers differ"
        )
    used = {key: getattr(config, name, None) for key, name in _TOKENS.items()}
    return warnings + [
        f"{key} = {source[key]} of the checkpoint counts as none; {_TOKENS[key]} is {token}"
        for key, token in used.items()
        if token is not None and _is_negative(source.get(key))
    ]
