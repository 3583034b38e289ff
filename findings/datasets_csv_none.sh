#!/usr/bin/env bash
# datasets 5.0.1: in a CSV file the answers "None", "NA" and "null" are missing, and 007 is 7.
#
# Expected: load_dataset("csv") gives the texts of the file, as Python's csv does, or numbers where a column has nothing else;
#   an answer that the file states is in the dataset.
# Seen: the words by which pandas marks missing values, such as None, NA, N/A, null, nan and -nan, become None, in columns of
#   texts and with quotes around them, too. Zeros in front are lost: "007" is 7, and 7.0 if one row has no value.
#   keep_default_na=False keeps the words. Nothing is logged.
# Matters for: tasks and training sets in CSV: "None" is a common answer to "which of these ...?", NA stands for Namibia, and
#   the target of such a row is null; house numbers, dates and codes lose their zeros, so that exact answers do not match.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import csv
import json
import sys
from pathlib import Path

from datasets import load_dataset

folder = Path(sys.argv[1])
for number, answers in enumerate((["None", "NA", "null", "Oslo"], ["007", "010"], ["007", "NA"])):
    file = folder / f"rows{number}.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([["answer"], *([answer] for answer in answers)])
    for settings in ({}, {"keep_default_na": False}):
        rows = load_dataset("csv", data_files=str(file), split="train", **settings)
        print(f"{json.dumps(answers)} {settings}: {json.dumps(rows['answer'][:])}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Quoted answers of a CSV file, with datasets 5.0.1\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
["None", "NA", "null", "Oslo"] {}: [null, null, null, "Oslo"]
["None", "NA", "null", "Oslo"] {'keep_default_na': False}: ["None", "NA", "null", "Oslo"]
["007", "010"] {}: [7, 10]
["007", "010"] {'keep_default_na': False}: [7, 10]
["007", "NA"] {}: [7.0, null]
["007", "NA"] {'keep_default_na': False}: ["007", "NA"]
SEEN
