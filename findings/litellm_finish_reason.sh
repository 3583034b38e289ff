#!/usr/bin/env bash
# litellm 1.110.2: an answer that the server gave up, or whose end it does not state, has finish_reason "stop".
#
# Expected: finish_reason is the server's, as openai's client gives it: a program must tell a whole answer from a part.
# Seen: "error" and null become "stop" with no word, and "abort", by which vLLM marks a request that it ended, with
#   a warning in the log. Streamed, "abort" raises an error; so do "error" and null for the provider openai, while
#   they read "stop" for hosted_vllm. "length" stays.
# Matters for: evaluations and gateways that pass through litellm: parts of answers are graded or stored as whole ones,
#   and a server that was stopped during a run leaves no trace in the results.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import litellm
import openai

litellm.suppress_debug_info = True
REASONS = ("stop", "length", "abort", "error", None)


class Endpoint(BaseHTTPRequestHandler):
    """Answers half a word, and ends it for the reason that the request names as its model."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reason = json.loads(asked["model"])
        common = {"id": "1", "created": 1, "model": "m"}
        if asked.get("stream"):
            content, kind = {"role": "assistant", "content": "par"}, "text/event-stream"
            chunks = [
                {**common, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
                for delta, end in ((content, None), ({}, reason))
            ]
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        else:
            message, kind = {"role": "assistant", "content": "par"}, "application/json"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = json.dumps({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(provider, reason, stream):
    arguments = {"messages": [{"role": "user", "content": "?"}], "stream": stream}
    if provider is None:
        answer = client.chat.completions.create(model=json.dumps(reason), **arguments)
    else:
        answer = litellm.completion(
            model=f"{provider}/{json.dumps(reason)}", api_base=url, api_key="none", max_retries=0, **arguments)
    if not stream:
        return answer.choices[0].finish_reason
    return [chunk.choices[0].finish_reason for chunk in answer if chunk.choices][-1]


for provider in (None, "hosted_vllm", "openai"):
    for stream in (False, True):
        ends = []
        for reason in REASONS:
            try:
                ends.append(str(ask(provider, reason, stream)))
            except Exception:
                ends.append("(error)")
        name = f"litellm, {provider}" if provider else "openai"
        print(f"{name}{', streamed' if stream else ''}: {' '.join(ends)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check litellm==1.110.2 openai==3.57.0
seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'What clients make of stop, length, abort, error and null, with litellm 1.110.2\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
openai: stop length abort error None
openai, streamed: stop length abort error None
litellm, hosted_vllm: stop length stop stop stop
litellm, hosted_vllm, streamed: stop length (error) stop stop
litellm, openai: stop length stop stop stop
litellm, openai, streamed: stop length (error) (error) (error)
SEEN
