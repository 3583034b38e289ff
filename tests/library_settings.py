"""Add the settings of a new release of a library to the table of known ones.

    python -m tests.library_settings megatron SITE_PACKAGES...
    python -m tests.library_settings huggingface

The first reads the sources of megatron-core, Megatron-LM's arguments, Megatron Bridge and NeMo 2 in
folders into which a release was installed or unpacked (`pip download --no-deps` and `unzip` do, for
releases that need another Python, too). Nothing is imported. The second takes the configurations of
the transformers that is installed. New names are added with `?` as their use, which a person
replaces; the tests fail until then.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import export_scripts.families.mapping.known_settings as known

FOLDER = Path(known.__file__).parent
MEGATRON, HUGGINGFACE = (FOLDER / f"{name}_settings.tsv" for name in ("megatron", "huggingface"))
UNKNOWN_USE = "?"

# Files of a release, and the classes whose fields are settings in each.
SOURCES = {
    "megatron/core/model_parallel_config.py": ("ModelParallelConfig",),
    "megatron/core/transformer/transformer_config.py": (
        "TransformerConfig", "MLATransformerConfig",
    ),
    "megatron/training/config/*.py": (),
    "megatron/training/models/*.py": (),
    "megatron/training/arguments.py": (),
    "megatron/arguments.py": (),
    "megatron/bridge/models/gpt_provider.py": (),
    "megatron/bridge/models/transformer_config.py": (),
    "megatron/bridge/models/gpt/*.py": (),
    "megatron/bridge/models/hybrid/*.py": (),
    "megatron/bridge/models/mamba/*.py": (),
    "megatron/bridge/models/qwen/qwen_provider.py": (),
    "megatron/bridge/models/starcoder/*.py": (),
    "megatron/bridge/models/llama/llama_provider.py": (),
    "megatron/bridge/models/mistral/*.py": (),
    "megatron/bridge/models/nemotron/nemotron_provider.py": (),
    "megatron/bridge/models/gemma/gemma_provider.py": (),
    "megatron/bridge/models/gemma/gemma[23]_provider.py": (),
    "nemo/collections/llm/gpt/model/base.py": ("GPTConfig",),
    "nemo/collections/llm/gpt/model/llama.py": (),
}  # fmt: skip


def megatron_settings(root: Path) -> dict[str, list[Any]]:
    """Return the names of a release's settings, and those of their defaults that are constants."""
    found: dict[str, list[Any]] = {}
    for pattern, classes in SOURCES.items():
        for path in sorted(root.glob(pattern)):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, default in (*_fields(tree, classes), *_arguments(tree)):
                values = found.setdefault(name, [])
                if default is not Ellipsis and default not in values:
                    values.append(default)
    return found


def _fields(tree: ast.Module, classes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef) or (classes and each.name not in classes):
            continue
        for line in each.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id, _constant(line.value)


def _arguments(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for each in ast.walk(tree):
        if not isinstance(each, ast.Call) or getattr(each.func, "attr", "") != "add_argument":
            continue
        more = {keyword.arg: keyword.value for keyword in each.keywords}
        options = [_constant(option) for option in each.args]
        first = next((each for each in options if str(each).startswith("--")), "")
        name = _constant(more.get("dest")) if "dest" in more else str(first).lstrip("-")
        action = str(_constant(more.get("action")))
        switched = {"store_true": False, "store_false": True}.get(action)
        if name and name is not Ellipsis:
            default = _constant(more["default"]) if "default" in more else switched
            yield str(name).replace("-", "_"), default


def _constant(node: ast.expr | None) -> Any:
    """Return the value of a constant, or of the default of a dataclass's field; else Ellipsis."""
    if isinstance(node, ast.Call):
        node = next((each.value for each in node.keywords if each.arg == "default"), None)
    try:
        return ... if node is None else json.loads(json.dumps(ast.literal_eval(node)))
    except (ValueError, TypeError):
        return ...


def huggingface_settings() -> dict[tuple[str, ...], list[Any]]:
    """Return the settings that the installed transformers has of each model type in the table.

    Those that all configurations have are of type *.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    common = known.huggingface_table()["*"]
    found: dict[tuple[str, ...], list[Any]] = {}
    for kind in known.huggingface_table().keys() - {"*"}:
        config = CONFIG_MAPPING[kind]()
        public = {name: each for name, each in vars(config).items() if not name.startswith("_")}
        for name, default in {**config.to_dict(), **public}.items():
            is_own = name in known.huggingface_table()[kind] or name not in common
            is_plain = isinstance(default, str | int | float | None)
            found[kind if is_own else "*", name] = [default] if is_own and is_plain else []
    return found


def add_settings(table: Path, found: dict[tuple[str, ...], list[Any]]) -> list[str]:
    """Add names and defaults to a table; return the lines that are new."""
    rows = {tuple(keys): (list(each.values), each) for keys, each in known.table_of_settings(table)}
    new = []
    for keys, defaults in found.items():
        if keys not in rows:
            rows[keys] = (defaults, known.KnownSetting(UNKNOWN_USE, ()))
            new.append("\t".join(keys))
        values, each = rows[keys]
        if each.use in ("read", "none"):
            values += [default for default in defaults if default not in values]
    lines = (
        "\t".join(
            (*keys, json.dumps(values), f"{each.use}: {each.reason}" if each.reason else each.use)
        )
        for keys, (values, each) in sorted(rows.items())
    )
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return new


def main() -> None:
    """Update a table, and print what is new in it."""
    if sys.argv[1] == "huggingface":
        print(*add_settings(HUGGINGFACE, huggingface_settings()), sep="\n")
    for root in map(Path, sys.argv[2:]):
        found: dict[tuple[str, ...], list[Any]] = {
            (name,): values for name, values in megatron_settings(root).items()
        }
        print(root, *add_settings(MEGATRON, found), sep="\n  ")


if __name__ == "__main__":
    main()
