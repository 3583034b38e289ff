"""config.ini in the dialect of the FasterTransformer loader: parse, format, write, read.

Reader rules: FasterTransformer, 3rdparty/INIReader.h (inih), a line buffer of 200 bytes.
"""

import pkgutil
import re
from pathlib import Path

from export_scripts.families.layout.config import FTConfig, Sections
from export_scripts.families.layout.spec import ModelFamily
from foundations.errors import CheckpointMismatchError

CONFIG_NAME = "config.ini"

# The loader splits longer physical lines.
MAX_LINE_BYTES = 199

# Main section of config.ini -> families that have it; a server only imports its own.
SECTIONS = {
    "gpt": ("export_scripts.families.gpt.layout:GPT",),
    "gptj": ("export_scripts.families.gptj:GPTJ",),
    "gptneox": ("export_scripts.families.gptneox:GPTNEOX",),
    "llama": ("export_scripts.families.dense.layout:DENSE",),
    "encoder": (
        "export_scripts.families.t5.layout:T5",
        "export_scripts.families.t5.layout:T5_ENCODER",
    ),
    "bert": ("export_scripts.families.bert:BERT",),
}

_INLINE_COMMENT = re.compile(r"\s;.*$")


def parse_ini(text: str) -> Sections:
    """Return section -> key -> value (section and key names in lower case).

    Raises:
        ValueError: A line is neither section, pair, comment nor continuation.
    """
    sections: Sections = {}
    section = {}
    last_key = None
    for number, line in enumerate(_physical_lines(text), start=1):
        bare = line.strip()
        if not bare or bare[0] in ";#":
            continue
        if line[0].isspace() and last_key is not None:
            section[last_key] += "\n" + _INLINE_COMMENT.sub("", bare)
        elif bare[0] == "[" and "]" in bare:
            section = sections.setdefault(bare[1 : bare.index("]")].strip().lower(), {})
            last_key = None
        else:
            pair = re.match(r"([^=:]*)[=:](.*)$", _INLINE_COMMENT.sub("", bare), re.DOTALL)
            if pair is None:
                raise ValueError(f"config.ini line {number} is not 'key = value': {bare[:60]!r}")
            last_key, value = pair[1].strip().lower(), pair[2].strip()
            section[last_key] = f"{section[last_key]}\n{value}" if last_key in section else value
    return sections


def _physical_lines(text: str) -> list[str]:
    data = text.encode().removeprefix(b"\xef\xbb\xbf")
    pieces = (
        line[start : start + MAX_LINE_BYTES]
        for line in data.splitlines()
        for start in range(0, max(len(line), 1), MAX_LINE_BYTES)
    )
    return [piece.decode(errors="replace") for piece in pieces]


def config_text(config: FTConfig) -> str:
    """Return the config.ini of a folder.

    Raises:
        ValueError: The loader, or a configparser, would read a value back differently.
    """
    problems = []
    lines = []
    for name, keys in config.sections().items():
        lines.append(f"[{name}]")
        for key, value in keys.items():
            problems += _unreadable(name, key, value)
            lines.append(f"{key} = {value}".replace("\n", "\n  "))
        lines.append("")
    if problems:
        raise ValueError("\n".join(problems))
    return "\n".join(lines) + "\n"


def _unreadable(section: str, key: str, value: str) -> list[str]:
    where = f"config.ini [{section}] {key} = {value[:40]!r}"
    problems = []
    # A list is continued after a comma.
    whole = value.replace(",\n", ",")
    if any(len(line.encode()) > MAX_LINE_BYTES for line in f"{key} = {value}".split("\n")):
        problems.append(f"{where}: the line is longer than {MAX_LINE_BYTES} bytes")
    if "\n" in whole or "%" in whole or _INLINE_COMMENT.search(" " + whole) or not whole.strip():
        problems.append(f"{where}: empty, or holds a line break, '%' or ' ;'")
    return problems


def write_config(ft_dir: Path, config: FTConfig) -> None:
    """Write `<ft_dir>/config.ini`. Raises as `config_text`."""
    (ft_dir / CONFIG_NAME).write_text(config_text(config), encoding="utf-8")


def family_of(sections: Sections) -> ModelFamily:
    """Return the family whose main section is present.

    Raises:
        ValueError: No family has such sections.
    """
    for section in filter(sections.__contains__, SECTIONS):
        for place in SECTIONS[section]:
            family: ModelFamily = pkgutil.resolve_name(place)
            if family.owns(sections):
                return family
    known = ", ".join(f"[{section}]" for section in sorted(SECTIONS))
    raise ValueError(f"config.ini has sections {sorted(sections)}; expected one of {known}")


_OF_RANK = re.compile(r".+\.(\d+)\.bin").fullmatch


def read_config(ft_dir: Path) -> tuple[ModelFamily, FTConfig]:
    """Return the family and config of an FT folder.

    Raises:
        CheckpointMismatchError: config.ini is missing, unreadable or incomplete.
    """
    path = ft_dir / CONFIG_NAME
    try:
        sections = parse_ini(path.read_text(encoding="utf-8"))
        _refuse_experts(sections)
        family = family_of(sections)
        _set_tensor_para_size(sections[family.config.SECTION], ft_dir)
        files = {entry.name for entry in ft_dir.glob("*.bin")}
        return family, family.config.from_sections(sections, files)
    except OSError as error:
        raise CheckpointMismatchError(
            f"{path} cannot be read ({error.strerror}); is {ft_dir} a converted folder?"
        ) from error
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{path}: {line}" for line in str(error).split("\n")
        ) from error


def _refuse_experts(sections: Sections) -> None:
    """Raise ValueError for a mixture of experts, as FasterTransformer's converters describe it.

    examples/pytorch/gpt/utils/megatron_gpt_moe_ckpt_convert.py, and T5's converter.
    """
    for section, keys in sections.items():
        for key in ("expert_num", "num_experts"):
            if keys.get(key, "0") not in ("", "0"):
                raise ValueError(
                    f"[{section}] {key} = {keys[key]}: mixtures of experts are not served from "
                    "shards; write their checkpoint as a Hugging Face folder "
                    "(convert.format=huggingface) and serve that with deploy.engine=vllm"
                )


def _set_tensor_para_size(keys: dict[str, str], ft_dir: Path) -> None:
    """Set tensor_para_size from the folder if config.ini omits it.

    NVIDIA's converters of GPT-J, GPT-NeoX, OPT and T5 omit it. If the folder is not named <N>-gpu,
    the rank numbers in its file names count.
    """
    named = re.fullmatch(r"(\d+)-gpu", ft_dir.name)
    if named is None:
        ranks = [int(found[1]) for path in ft_dir.iterdir() if (found := _OF_RANK(path.name))]
        keys.setdefault("tensor_para_size", str(max(ranks, default=0) + 1))
        return
    if keys.setdefault("tensor_para_size", named[1]) != named[1]:
        raise ValueError(
            f"tensor_para_size = {keys['tensor_para_size']}, but the folder is named {ft_dir.name}"
        )
