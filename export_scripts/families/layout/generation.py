"""A model's end tokens, from transformers' generation_config.json."""

from foundations.files.json_content import Table

GENERATION_FILE = "generation_config.json"
_MAX_ID = (1 << 31) - 1


def end_tokens(settings: Table, source: object = GENERATION_FILE) -> tuple[int, ...]:
    """Return the end tokens that settings state: one, several or none.

    A negative ID means none.

    Raises:
        ValueError: The setting is something else; the message begins with `source`.
    """
    value = settings.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    for token in tokens:
        if type(token) is not int or token > _MAX_ID:
            raise ValueError(
                f"{source}: eos_token_id = {value!r:.100} is neither a token id nor a list of some"
            )
    return tuple(token for token in dict.fromkeys(tokens) if token >= 0)
