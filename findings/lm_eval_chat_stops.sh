#!/usr/bin/env bash
# lm_eval 0.4.13: of a task's stop strings, a chat endpoint is asked for the first four; a completions endpoint for all.
#
# Expected: an answer ends at each string of the task's `until`, whether the endpoint or the harness cuts it there.
# Seen: local-chat-completions sends the first four with no warning, and does not cut the answer itself: what follows
#   the fifth is graded. local-completions sends all five, and the end token after them.
# Matters for: comparisons of the two interfaces of one server. The scores of tasks with long lists differ, and
#   the server's own end token, which comes last, is never among the four.
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
(folder / "sums.yaml").write_text(f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{sum}}}}"
doc_to_target: "{{{{result}}}}"
generation_kwargs: {{until: [A, B, C, D, E], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "4E and more"
        for stop in asked["stop"]:
            text = text.partition(stop)[0]
        Endpoint.asked = asked["stop"]
        choice = {"index": 0, "finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
for name, path, is_chat in (("local-completions", "completions", False), ("local-chat-completions", "chat/completions", True)):
    url = f"http://127.0.0.1:{server.server_port}/v1/{path}"
    report = lm_eval.simple_evaluate(
        model=name, model_args=f"model=m,base_url={url},tokenizer_backend=None,num_concurrent=1,max_retries=1,eos_string=Z",
        tasks=["sums"], task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=is_chat, bootstrap_iters=0, log_samples=True)
    answer = report["samples"]["sums"][0]["filtered_resps"][0]
    print(f"{name}: stop {Endpoint.asked}, graded {answer!r}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'until [A, B, C, D, E], with lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
local-completions: stop ['A', 'B', 'C', 'D', 'E', 'Z'], graded '4'
local-chat-completions: stop ['A', 'B', 'C', 'D'], graded '4E and more'
SEEN
