"""The generation_config.json of a folder of weights or of a tokenizer.

It is used as in vLLM (0.32, `ModelConfig.try_get_generation_config`): every end token counts, and
`do_sample` is ignored.
"""

from pathlib import Path

from export_scripts.families.layout.generation import GENERATION_FILE, end_tokens
from foundations.files.json_content import Fields, json_object, without_nulls

# Key in the file -> OpenAI's request field whose default it is.
_DEFAULTS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def generation_settings(folder: Path) -> Fields:
    """Return the content of a folder's file, {} without one. Raises OSError, ValueError."""
    path = folder / GENERATION_FILE
    return json_object(path.read_bytes(), path) if path.is_file() else {}


def all_end_tokens(folder: Path, end_id: int | None = None) -> tuple[int, ...]:
    """Return the tokens that end an answer of a folder's model, `end_id` first.

    Raises OSError, or ValueError if its generation_config.json states something else than tokens.
    """
    named = end_tokens(generation_settings(folder), folder / GENERATION_FILE)
    first = () if end_id is None else (end_id,)
    return tuple(dict.fromkeys((*first, *named)))


def sampling_defaults(folder: Path) -> Fields:
    """Return the defaults of OpenAI's request fields that a folder's file states.

    Raises OSError, or ValueError if the file is not a JSON object.
    """
    settings = generation_settings(folder)
    return without_nulls({field: settings.get(name) for name, field in _DEFAULTS.items()})
