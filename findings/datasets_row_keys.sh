#!/usr/bin/env bash
# datasets 5.0.1: a generator's rows keep the first row's keys alone, and tool calls of a list get each other's arguments.
#
# Expected: a row of Dataset.from_generator has all keys that were yielded, or there is an error; a conversation has the
#   same tool calls whether its rows come from a list, a generator or a file of JSON Lines.
# Seen: keys that the first row does not have are dropped, with their values. (The documentation of from_list says so, that
#   of from_generator does not.) Inside of rows it is the other way round: from_list gives every tool call the arguments of
#   all others, as null; from_generator and load_dataset("json") keep them as they are. Nothing is logged.
# Matters for: training and evaluation on chats: a template writes {"city": "Oslo", "query": null} where the model should learn
#   {"city": "Oslo"}, and what it sees depends on the other rows and on the call that made the dataset.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

from datasets import Dataset, load_dataset

rows = [{"question": "a"}, {"question": "b", "answer": "c"}]


def generate():
    yield from rows


print("generator:", json.dumps(Dataset.from_generator(generate).to_list()))
calls = [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "search", "arguments": {"query": "ships"}}]
chats = [{"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls]
file = Path(sys.argv[1]) / "chats.jsonl"
file.write_text("\n".join(json.dumps(chat) for chat in chats))
for name, data in (
    ("list", Dataset.from_list(chats)),
    ("generator", Dataset.from_generator(lambda: iter(chats))),
    ("JSON Lines", load_dataset("json", data_files=str(file), split="train")),
):
    print(f"{name}: {json.dumps([row['messages'][0]['tool_calls'][0]['arguments'] for row in data])}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Rows {"question": "a"} and {"question": "b", "answer": "c"}, and arguments of two tool calls, with datasets 5.0.1\n%s\n' \
  "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
generator: [{"question": "a"}, {"question": "b"}]
list: [{"city": "Oslo", "query": null}, {"city": null, "query": "ships"}]
generator: [{"city": "Oslo"}, {"query": "ships"}]
JSON Lines: [{"city": "Oslo"}, {"query": "ships"}]
SEEN
