#!/usr/bin/env bash
# lm_eval 0.4.13: the length that a task states as `max_new_tokens` reaches an endpoint in addition to `max_tokens: 256`.
#
# Expected: one length per request, the task's: its Hugging Face model takes `max_new_tokens` and `max_gen_toks` alike,
#   and ten of the harness's own task files state the former.
# Seen: local-completions sends both, `max_new_tokens` of the task and its own default as `max_tokens`, which is what
#   OpenAI's protocol has. With `max_gen_toks` the task's length is `max_tokens`, and nothing else is sent.
# Matters for: scores through a server. One that passes over unknown fields generates 256 tokens for a task of 5 and
#   for a task of 512; one that refuses them answers none of the task's requests.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])
rows = folder / "rows.jsonl"
rows.write_text('{"sum": "2+2=", "result": "4"}\n')
for name in ("max_gen_toks", "max_new_tokens"):
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{sum}}}}"
doc_to_target: "{{{{result}}}}"
generation_kwargs: {{until: [A], {name}: 5, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        Endpoint.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "text": "4"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1/completions"
for name in ("max_gen_toks", "max_new_tokens"):
    lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"model=m,base_url={url},tokenizer_backend=None,num_concurrent=1,max_retries=1,eos_string=Z",
        tasks=[name], task_manager=TaskManager(include_path=str(folder), include_defaults=False), bootstrap_iters=0)
    sent = {key: value for key, value in Endpoint.asked.items() if "tok" in key}
    print(f"{name}: 5 sends {sent}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'With lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
max_gen_toks: 5 sends {'max_tokens': 5}
max_new_tokens: 5 sends {'max_tokens': 256, 'max_new_tokens': 5}
SEEN
