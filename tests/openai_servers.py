"""A tiny Hugging Face folder with a tokenizer, and a program that serves OpenAI's protocol."""

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = (
    "The old lighthouse stood at the end of the point",
    "She opened the letter",
    "It was rain",
)

# Serves until SIGTERM: python PROGRAM PORT MODEL [broken].
PROGRAM = """
import http.server, json, os, sys
port, model, *more = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def send(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.send(200 if self.path == "/health" else 404, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"] == "end":
            os._exit(7)
        if "broken" in more or body["model"] != model:
            return self.send(500, {"detail": "no such kernel"})
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers.get("authorization") != f"Bearer {key}":
            return self.send(401, {})
        self.send(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})
if "fails" in more:
    sys.exit("error: unrecognized arguments: --wrong-option")
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def write_program(folder: Path) -> list[str]:
    """Return the beginning of the program's command line."""
    path = folder / "serve.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes and a few merges; return how many tokens it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0]
    ).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_served_model(folder: Path) -> Path:
    """Write a random GPT-2 of two layers with a tokenizer."""
    vocab_size = write_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 2048}
    config = transformers.GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
