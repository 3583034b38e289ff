"""The identity of a folder of weights, as a server reports it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from export_scripts.ft.config_ini import CONFIG_NAME
from export_scripts.ft.validation import read_manifest
from foundations import __version__
from foundations.errors import CheckpointMismatchError

_DIGITS = 16


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of config.ini and of the name, size and checksum of every file of weights.

    Without a readable config.ini and manifest, it is "": all files would have to be read for it.
    """
    try:
        files = read_manifest(folder)["files"]
        config = (folder / CONFIG_NAME).read_bytes()
    except (OSError, CheckpointMismatchError):
        return ""
    if not files:
        return ""
    found = sorted((name, int(each["size_bytes"]), each["crc32"]) for name, each in files.items())
    return hashlib.sha256(config + json.dumps(found).encode()).hexdigest()[:_DIGITS]


def served_identity(folder: Path | None, parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the identity of a served model: the checkpoint's hash, types, and Slipway's version.

    `parameters` are those in the model's config.pbtxt.
    """
    forms = ["int8"] if parameters.get("int8_mode", "0") != "0" else []
    forms += ["fp8"] if parameters.get("fp8", "0") != "0" else []
    cache = parameters.get("kv_cache_dtype", "auto")
    forms += [f"kv_{cache}"] if cache != "auto" else []
    return {
        "checkpoint": "" if folder is None else checkpoint_hash(folder),
        "data_type": parameters.get("data_type", ""),
        "quantization": "+".join(forms) or "none",
        "version": __version__,
    }
