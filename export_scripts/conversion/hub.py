"""Models of the Hugging Face hub in this machine's cache, by their IDs; nothing is downloaded.

Layout of the cache: huggingface_hub, docs "Understand caching". Its environment variables are read
as huggingface_hub reads them.
"""

import os
import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_ARCHIVES = (".nemo", ".ckpt", ".tar", ".gz", ".bin", ".pt", ".safetensors", ".yaml", ".json")


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps downloaded models."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{base}/huggingface")
    return Path(home).expanduser() / "hub"


def hub_id(path: Path) -> str | None:
    """Return the ID, such as facebook/opt-125m, that the user gave as a path.

    None if the path exists, or cannot be an ID relative to the working directory.
    """
    if path.exists():
        return None
    if path.is_absolute():
        if not path.is_relative_to(Path.cwd()):
            return None
        path = path.relative_to(Path.cwd())
    text = path.as_posix()
    return text if _ID.fullmatch(text) and not text.lower().endswith(_ARCHIVES) else None


def cached_model(path: Path) -> Path:
    """Return the cached folder of the model whose ID `path` is; any other path unchanged."""
    if (name := hub_id(path)) is None:
        return path
    root = hub_cache() / f"models--{name.replace('/', '--')}"
    if not root.is_dir():
        return path
    from export_scripts.checkpoints.huggingface import snapshot_folder  # imports all readers

    return snapshot_folder(root)


def hub_advice(path: Path) -> str:
    """Return how to get the model whose ID `path` may be; empty if it cannot be one."""
    if (name := hub_id(path)) is None:
        return ""
    return (
        f"; if the model {name} of the Hugging Face hub is meant, it is not in {hub_cache()}: "
        f"fetch it with `hf download {name}` where there is a network, and name the folder here"
    )
