"""Paths and file names of an FT checkpoint; imports only the standard library."""

from pathlib import Path

from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily

# Patterns of files that converters write next to the weights: the tokenizer's, and all.
TOKENIZER_FILES = (
    "vocab.json", "vocab.txt", "vocab.bpe", "encoder.json", "merges.txt", "tokenizer*", "*.model",
    "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template*", "additional_chat_templates*",
)  # fmt: skip
EXTRA_FILES = ("config.ini", "args.txt", *TOKENIZER_FILES)


def ft_directory(output_dir: Path, tp_size: int) -> Path:
    """Return the folder of the weights for `tp_size` ranks."""
    return output_dir / f"{tp_size}-gpu"


def staging_directory(folder: Path) -> Path:
    """Return the hidden folder that becomes `folder` when it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def manifest_path(ft_dir: Path) -> Path:
    """Return the path of a folder's manifest, next to the folder."""
    return ft_dir.parent / f"{ft_dir.name}.manifest.json"


def expected_files(family: ModelFamily, config: FTConfig) -> dict[str, int]:
    """Return name -> size in bytes of every weight file in a folder.

    Raises:
        ValueError: The ranks do not divide a split axis.
    """
    tp_size = config.tensor_para_size
    return {
        name: tensor.file_bytes(tp_size, config.weight_data_type)
        for tensor in family.tensors(config)
        for name in tensor.file_names(tp_size)
    }
