#!/usr/bin/env bash
# tritonclient 2.73.0: one text output is bytes or str, by a flag of the request; None becomes the text "None".
#
# Expected: as_numpy of an output of type BYTES gives the same elements whether the answer's data was binary or JSON.
# Seen: an array of objects in both cases, of bytes if the data was binary, as by default, and of str if the output was
#   requested with binary_data=False (or the server sent JSON): one compares equal to b"yes" and the other to "yes". Towards
#   the server None in an array of texts is sent as the four letters None, in either form, with no error.
# Matters for: clients and tests that compare or decode answers: after a change of the flag all comparisons are false, and
#   a missing text of a data frame is a prompt to the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import serialize_byte_tensor

output = {"name": "text", "datatype": "BYTES", "shape": [1]}
answer = {"model_name": "m", "model_version": "1"}
in_json = json.dumps({**answer, "outputs": [{**output, "data": ["yes"]}]}).encode()
data = serialize_byte_tensor(np.array([b"yes"], dtype=object)).item()
head = json.dumps({**answer, "outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
for name, result in (
    ("binary", InferenceServerClient.parse_response_body(head + data, header_length=len(head))),
    ("JSON", InferenceServerClient.parse_response_body(in_json)),
):
    values = result.as_numpy("text")
    print(f"answer in {name}: {values.dtype} {values[0]!r}, equal to 'yes': {values[0] == 'yes'}, to b'yes': {values[0] == b'yes'}")
for binary in (True, False):
    tensor = InferInput("prompt", [2], "BYTES")
    tensor.set_data_from_numpy(np.array(["hello", None], dtype=object), binary_data=binary)
    body, length = InferenceServerClient.generate_request_body([tensor])
    sent = body[length:] if binary else json.loads(body)["inputs"][0]["data"]
    print(f"['hello', None] in {'binary' if binary else 'JSON'}: {sent}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'tritonclient[http]==2.73.0' numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Texts in tritonclient 2.73.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
answer in binary: object b'yes', equal to 'yes': False, to b'yes': True
answer in JSON: object 'yes', equal to 'yes': True, to b'yes': False
['hello', None] in binary: b'\x05\x00\x00\x00hello\x04\x00\x00\x00None'
['hello', None] in JSON: ['hello', 'None']
SEEN
