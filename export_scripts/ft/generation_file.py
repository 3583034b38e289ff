"""The generation_config.json of a folder of weights, or of a tokenizer.

It is taken as vLLM takes it (0.32, `ModelConfig.try_get_generation_config`): every end token
counts, and `do_sample` does not.
"""

from pathlib import Path

from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from foundations.files.json_content import Fields, json_object

# Defaults of a request: names in the file to those of OpenAI's fields.
_DEFAULTS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def generation_settings(folder: Path) -> Fields:
    """Return the content of a folder's file, nothing if it has none. Raises OSError, ValueError."""
    path = folder / GENERATION_FILE
    return json_object(path.read_bytes(), path) if path.is_file() else {}


def all_end_tokens(folder: Path, end_id: int | None = None) -> tuple[int, ...]:
    """Return the tokens that end an answer of a folder's model: `end_id`, and then the others.

    Raises OSError, or ValueError if its generation_config.json names something else.
    """
    named = end_tokens(generation_settings(folder), folder / GENERATION_FILE)
    first = () if end_id is None else (end_id,)
    return tuple(dict.fromkeys((*first, *named)))


def sampling_defaults(folder: Path) -> Fields:
    """Return what a folder's file states for what a request leaves open, by OpenAI's fields.

    Raises OSError, or ValueError if it is not an object of JSON.
    """
    settings = generation_settings(folder)
    stated = {field: settings.get(name) for name, field in _DEFAULTS.items()}
    return {field: value for field, value in stated.items() if value is not None}
