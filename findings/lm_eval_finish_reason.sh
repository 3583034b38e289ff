#!/usr/bin/env bash
# lm_eval 0.4.13: a reply in which an endpoint gives no answer is graded as a wrong answer.
#
# Expected: a reply of OpenAI's protocol whose finish_reason says that nothing was generated, or whose content is null,
#   is an error, or is left out of the score and counted.
# Seen: finish_reason is not read. An empty answer with finish_reason "abort" and a null content with "error" are graded
#   like any answer: exact_match 0.0 over all samples, and the run succeeds.
# Matters for: gates on such scores. A server that is shut down during the run reads as a model that fails.
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
rows.write_text('{"sum": "2+2=", "result": "4"}\n{"sum": "1+3=", "result": "4"}\n')
(folder / "sums.yaml").write_text(f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{sum}}}}"
doc_to_target: "{{{{result}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")


class Endpoint(BaseHTTPRequestHandler):
    choice = {}

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [{"index": 0} | self.choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
for reason, content in (("stop", "4"), ("abort", ""), ("error", None)):
    Endpoint.choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
    report = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=f"model=m,base_url={url},tokenizer_backend=None,num_concurrent=1,max_retries=1",
        tasks=["sums"], task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True, bootstrap_iters=0)
    score, samples = report["results"]["sums"]["exact_match,none"], report["n-samples"]["sums"]["effective"]
    print(f"{reason} {content!r}: {score} of {samples}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'finish_reason, content, exact_match with lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
stop '4': 1.0 of 2
abort '': 0.0 of 2
error None: 0.0 of 2
SEEN
