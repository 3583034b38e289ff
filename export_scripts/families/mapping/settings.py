"""A source's model configuration: required keys, aliases, and refused values.

Problems are gathered and raised together. Absent keys have the defaults of the library that
wrote the file.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.checkpoints.base import json_file
from export_scripts.checkpoints.tokenizers import special_ids
from export_scripts.families.layout.config import MOST_LAYERS, ConfigT, FTConfig
from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from export_scripts.families.mapping.prompts import prompt_fields
from export_scripts.families.mapping.source_mapping import Facts
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Table

REQUIRED = object()  # as a default: the key must be there

_MOST_NAME_BYTES = 120
_MOST = (1 << 31) - 1  # FT and the tokenizers count in 32 bits
# Keys of special tokens -> attribute of a config with the token that was taken.
_TOKENS = {
    "bos_token_id": "start_id",
    "decoder_start_token_id": "start_id",
    "eos_token_id": "end_id",
    "pad_token_id": "pad_id",
}

_ADDED_TOKENS = ("tokenizer.json", "tokenizer_config.json")
# Names of Hugging Face activations -> spelling in config.ini, and whether its gelu is by erf.
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
# With those that FasterTransformer does not know.
ALL_ACTIVATIONS = {**HUGGINGFACE_ACTIVATIONS, "relu2": ("Relu2", False)}


@dataclass
class Settings:
    """A source's configuration, with the problems found in reading it."""

    source: Table  # as its library wrote it
    label: str = "config.json"  # in messages
    problems: list[str] = field(default_factory=list)  # missing and unreadable keys so far

    def note(self, problem: str) -> None:
        """Note a problem with a key."""
        self.problems.append(f"{self.label}: {problem}")

    def value(self, *names: str, default: Any = REQUIRED) -> Any:
        """Return the value under whichever of several spellings is set; null counts as unset."""
        given = [name for name in names if self.source.get(name) is not None]
        if not given:
            if default is REQUIRED:
                self.problems.append(f"{self.label} has no {' or '.join(names)}")
                return None
            return default
        first, *others = given
        value = self.source[first]
        self.problems += [
            f"{self.label}: {first} = {value!r} but {name} = {self.source[name]!r}, two "
            "spellings of one setting: expected one value; remove the wrong one"
            for name in others
            if self.source[name] != value
        ]
        return value

    def integer(self, *names: str, default: Any = REQUIRED, least: int = 1) -> int:
        """Return an integer of at least `least`, or 1 after noting a problem.

        One of layers is bounded before anything is made for each.
        """
        value = self.value(*names, default=default)
        if value is None:
            return 1
        most = MOST_LAYERS if names[0].endswith(("_layer", "_layers")) else _MOST
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
        """Return a number greater than 0, as it is stated, or None where null switches it off."""
        stated = self.source.get(name, default)
        if stated is None:
            return None
        number = self.number(name, default=default)
        return stated if stated == number else number

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers greater than 0."""
        value = self.value(name)
        entries = value if isinstance(value, (list, tuple)) else [None]
        if not all(_is_positive(each) for each in entries):
            self.note(f"{name} = {value!r}: expected a list of numbers greater than 0")
            return (1.0,)
        return tuple(map(float, entries))

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean; null, which is false to some readers, is refused."""
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
        """Return the same, of activations that FasterTransformer does not know too."""
        return self.activation(*names, default=default, known=ALL_ACTIVATIONS)

    def divide(self, total: int, parts: int, what: str) -> int:
        """Return total / parts; a remainder is noted as a problem."""
        if parts == 0 or total % parts:
            self.note(f"{what}: {total} does not divide by {parts}")
            return 1
        return total // parts

    def token_ids(
        self, facts: Facts, *, bos: int | None = None, eos: int | None = None
    ) -> tuple[int, int]:
        """Return (start_id, end_id); a model with only one uses it for both.

        Sources in order: the user, config.json with the library's defaults, the generation's
        configuration, the tokenizer.
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
        """Return the first of several token ids (a model may name several last tokens).

        A negative id counts as none.
        """
        if isinstance(value, list):
            value = next((each for each in value if not _is_negative(each)), None)
        if value is None or _is_negative(value):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value > _MOST:
            self.note(f"{name} = {value!r} is not a token id")
            return None
        return value

    def built(self, config: Callable[..., ConfigT], facts: Facts, **fields: Any) -> ConfigT:
        """Return a config of the fields, and of those that are asked for and added.

        Raises:
            CheckpointMismatchError: Problems were noted, or the fields do not belong together; all
                are listed.
        """
        fields["weight_data_type"] = facts.weight_data_type
        fields["tensor_para_size"] = facts.tp_size
        if facts.prompts:
            fields |= prompt_fields(facts, start_id=fields["vocab_size"])
        if facts.activation_ranges is not None:
            fields["int8"] = True
        try:
            made = config(**fields)
        except ValueError as error:
            for problem in str(error).split("\n"):
                self.note(problem)
        self.finish()
        return made

    def finish(self) -> None:
        """Raise the noted problems, each once though several fields come of one setting.

        Raises:
            CheckpointMismatchError: There are any.
        """
        if self.problems:
            raise CheckpointMismatchError(dict.fromkeys(self.problems))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < sys.float_info.max


def _is_negative(value: Any) -> bool:
    return isinstance(value, int) and value < 0


def _generation_config(facts: Facts) -> Table:
    """Return generation_config.json, which newer folders keep the token ids in."""
    file = facts.tokenizer.get(GENERATION_FILE)
    return json_file(file) if file else {}


def generation_file(facts: Facts, config: FTConfig) -> dict[str, bytes]:
    """Return generation_config.json for the folder, where the source's own lacks an end token.

    A model ends at every token that its configurations and its tokenizer name (as with vLLM), or
    at the one that the user states.

    Raises:
        CheckpointMismatchError: One of them names something else than tokens.
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
    """Return the name for config.ini: the source's own without folders, or the family's."""
    name = str(source.get("_name_or_path") or source.get("name_or_path") or "")
    name = name.rstrip("/").rsplit("/", 1)[-1]
    # config.ini allows one short line without special characters.
    name = "".join(each for each in name if each.isprintable() and each not in "%;")
    return name.encode()[:_MOST_NAME_BYTES].decode(errors="ignore").strip() or family


def half_precision_warnings(facts: Facts, config: FTConfig) -> list[str]:
    """Return a warning when weights trained in bf16 are to compute in fp16."""
    stated = str(facts.config.get("dtype") or facts.config.get("torch_dtype") or "")
    stored = {piece.dtype for pieces in facts.reader.tensors.values() for piece in pieces}
    if config.weight_data_type != "fp16" or not ("bfloat16" in stated or "bf16" in stored):
        return []
    return [
        "the model was trained in bf16, whose range fp16 lacks: activations can overflow in fp16 "
        "even though every weight fits; convert with weight_data_type bf16 or fp32 and serve with "
        "data_type bf16"
    ]


def source_warnings(facts: Facts, config: FTConfig) -> list[str]:
    """Return warnings about code of a source's own, and about its special tokens.

    Some models write -1 for a token that they do not have.
    """
    source = facts.config
    warnings = []
    code = source.get("auto_map")
    if isinstance(code, Mapping):
        code = code.get("AutoModelForCausalLM") or code.get("AutoModel")
    if code:
        warnings.append(
            f"config.json: auto_map names the model's own code ({code}), which is not run: the "
            f"model is taken as transformers' {source.get('model_type')}; where its code computes "
            "something else, answers differ"
        )
    taken = {key: getattr(config, name, None) for key, name in _TOKENS.items()}
    return warnings + [
        f"{key} = {source[key]} of the checkpoint counts as none; {_TOKENS[key]} is {token}"
        for key, token in taken.items()
        if token is not None and _is_negative(source.get(key))
    ]
