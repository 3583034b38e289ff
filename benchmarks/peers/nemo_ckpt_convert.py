"""Run FasterTransformer's NeMo GPT converter, unchanged, under a current PyTorch and without NeMo.

Two things the converter expects from its surroundings are supplied: `torch.load` unpickles whatever
it is given (the default until PyTorch 2.6), and NeMo's tokenizer factory, of which it asks only the
ids of the first and last token.

Usage: nemo_ckpt_convert.py <FasterTransformer checkout> <the converter's own arguments>
"""

from __future__ import annotations

import functools
import runpy
import sys
import types
from pathlib import Path

import torch


class _Tokenizer:
    bos_id = eos_id = 0


def _provide_nemo_tokenizer() -> None:
    name = "nemo.collections.nlp.modules.common.tokenizer_utils"
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:depth])] = types.ModuleType(".".join(parts[:depth]))
    sys.modules[name].get_nmt_tokenizer = lambda *_, **__: _Tokenizer()  # type: ignore[attr-defined]


def main() -> None:
    """Run the converter of the checkout named first on the command line."""
    checkout = Path(sys.argv[1])
    torch.load = functools.partial(torch.load, weights_only=False)
    _provide_nemo_tokenizer()
    sys.path.insert(0, str(checkout))
    sys.argv = ["nemo_ckpt_convert.py", *sys.argv[2:]]
    script = checkout / "examples/pytorch/gpt/utils/nemo_ckpt_convert.py"
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
