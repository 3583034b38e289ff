#!/usr/bin/env bash
# openai 3.57.0: timeout=1 lets an answer take three seconds, and sends a request that is late three times.
#
# Expected: a request with timeout=1 has ended after a second, with an answer or with APITimeoutError, and was sent once:
#   whoever gives up waiting for a generation does not order it again.
# Seen: the limit is that of a pause between two pieces of the answer: one whose pieces are half a second apart is read to
#   its end, however long that takes. Where nothing comes the request is sent again, twice by default, although it is not
#   idempotent: the error comes after more than three seconds, and the server has three requests.
# Matters for: load tests and evaluations with a limit per request: latencies beyond it are counted as answered, and a server
#   that is too slow gets three times the work. max_retries=0 sends once; a limit of the whole needs a clock of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

MESSAGE = {"role": "assistant", "content": "a" * 40}
CHOICE = {"index": 0, "message": MESSAGE, "finish_reason": "stop"}
ANSWER = json.dumps({"id": "1", "created": 1, "model": "m", "object": "chat.completion", "choices": [CHOICE]}).encode()
asked = []


class Endpoint(BaseHTTPRequestHandler):
    """Sends its answer in seven pieces, or not within four seconds, by the name of the model."""

    def do_POST(self):
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        asked.append(model)
        with contextlib.suppress(OSError):
            if model == "late":
                time.sleep(4)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(ANSWER)))
            self.end_headers()
            for start in range(0, len(ANSWER), len(ANSWER) // 6):
                self.wfile.write(ANSWER[start:start + len(ANSWER) // 6])
                self.wfile.flush()
                time.sleep(0.5)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
for model, settings in (("slow", {}), ("late", {}), ("late", {"max_retries": 0})):
    asked.clear()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", timeout=1, **settings)
    began = time.monotonic()
    try:
        end = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "?"}]).choices[0].finish_reason
    except openai.APITimeoutError:
        end = "APITimeoutError"
    whole = time.monotonic() - began
    print(f"{model} {settings}: {end}, {'more' if whole > 2.5 else 'less'} than 2.5 s, requests {len(asked)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Requests with timeout=1, with openai 3.57.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
slow {}: stop, more than 2.5 s, requests 1
late {}: APITimeoutError, more than 2.5 s, requests 3
late {'max_retries': 0}: APITimeoutError, less than 2.5 s, requests 1
SEEN
