"""Answers of a release of transformers about folders; runs alone, with an interpreter of it.

Standard input holds a list of requests, each with a `folder`, and `texts` for its tokenizer or
`ids` for its model; standard output gets as many answers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Interpreters of other releases than this environment's, separated as in PATH.
OTHERS = [each for each in os.environ.get("SLIPWAY_TRANSFORMERS", "").split(os.pathsep) if each]


def answered(requests: Sequence[Mapping[str, Any]], python: str | None) -> list[Any]:
    """Return the answers of an interpreter; None: of this one."""
    if python is None:
        return [answer(**request) for request in requests]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [python, __file__], input=json.dumps(requests), env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def answer(
    folder: str, texts: Sequence[str] | None = None, ids: Sequence[int] | None = None
) -> Any:
    """Return (ids, text of these ids) of each text, or the logits of ids; an error as its text."""
    try:
        return _tokenized(folder, texts) if texts is not None else _logits(folder, ids or ())
    except Exception as error:  # whatever that release raises
        return f"{type(error).__name__}: {error}"


def _tokenized(folder: str, texts: Sequence[str]) -> list[Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [[ids, tokenizer.decode(ids)] for ids in found]


def _logits(folder: str, ids: Sequence[int]) -> list[list[float]]:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, loading = kind.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"], loading
    assert not loading["unexpected_keys"], loading
    tokens = torch.tensor([ids])
    decoder = {"decoder_input_ids": tokens} if hasattr(model, "decoder") else {}
    with torch.no_grad():
        out = model.eval()(tokens, **decoder)
    return (out.logits if "logits" in out else out.last_hidden_state)[0].tolist()


if __name__ == "__main__":
    print(json.dumps([answer(**request) for request in json.load(sys.stdin)]))
