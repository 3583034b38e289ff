"""A random Hugging Face GPT-2 that takes text, and a server that passes for the Hub."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.json_files import write_json

MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "o n", "e r", "Ġ s")
REVISION = "0123456789abcdef0123456789abcdef01234567"


def _stand_ins() -> list[str]:
    """Return the character of each byte, as GPT-2 has them (encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(0x100 + number) for number in range(len(others)))]


def write_tiny_gpt2(target: Path, *, seed: int = 0, positions: int = 48) -> Path:
    """Write config, weights and a byte-level BPE; heads 4 of 6, 4 layers, 265 tokens."""
    target.mkdir(parents=True)
    tokens = [*_stand_ins(), *(merge.replace(" ", "") for merge in MERGES)]
    tokens.append("<|endoftext|>")
    vocab = {token: index for index, token in enumerate(tokens)}
    (target / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (target / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *MERGES]) + "\n", encoding="utf-8"
    )
    h, heads, layers, end = 24, 4, 4, vocab["<|endoftext|>"]
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_embd": h,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": positions,
        "vocab_size": len(vocab),
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    write_json(target / "config.json", config)
    shapes = {
        "wte.weight": (len(vocab), h),
        "wpe.weight": (positions, h),
        "ln_f.weight": (h,),
        "ln_f.bias": (h,),
    }
    for layer in range(layers):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (h,),
                "ln_1.bias": (h,),
                "attn.c_attn.weight": (h, 3 * h),
                "attn.c_attn.bias": (3 * h,),
                "attn.c_proj.weight": (h, h),
                "attn.c_proj.bias": (h,),
                "ln_2.weight": (h,),
                "ln_2.bias": (h,),
                "mlp.c_fc.weight": (h, 4 * h),
                "mlp.c_fc.bias": (4 * h,),
                "mlp.c_proj.weight": (4 * h, h),
                "mlp.c_proj.bias": (h,),
            }.items()
        }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()
    }
    safetensors.torch.save_file(
        {f"transformer.{name}": value for name, value in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


class _Hub(BaseHTTPRequestHandler):
    """The few answers of the Hub that a download needs."""

    repositories: dict[str, Path]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        for name, folder in self.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                self._api(name, folder, path)
                return
            if path.startswith(f"/{name}/resolve/"):
                self._file(folder / path.split("/resolve/")[1].split("/", 1)[1])
                return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _api(self, name: str, folder: Path, path: str) -> None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [str(file.relative_to(folder)) for file in files]
        answer: Any = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": REVISION,
            "private": False,
            "siblings": [{"rfilename": each} for each in names],
        }
        if "/tree/" in path:
            answer = [
                {"type": "file", "path": each, "size": file.stat().st_size, "oid": _digest(file)}
                for each, file in zip(names, files, strict=True)
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": REVISION}
        self._send(200, file.read_bytes(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def standing_in_for_the_hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as repositories; give the address, and a list of the paths asked for."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"repositories": repositories, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
