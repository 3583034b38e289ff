#!/usr/bin/env bash
# prometheus_client 0.26.0: its parser gives the counters of Triton's metrics another name.
#
# Expected: text_string_to_metric_families reads the text format of Prometheus, in which a counter may have any name, and a
#   sample keeps the name that the text has, as Prometheus itself keeps it.
# Seen: every sample of type counter whose name does not end in _total gets this ending: nv_inference_count, which Triton
#   reports, is nv_inference_count_total, also where generate_latest writes it out again. Gauges keep their names. There is no
#   error or warning.
# Matters for: sidecars, tests and exporters that read a tritonserver through this package. A lookup by the name that Triton
#   documents finds nothing, which reads as zero requests, and dashboards and alerts on the names that were passed through
#   have no data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

TEXT = """\
# HELP nv_inference_request_success Number of successful inference requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="gpt",version="1"} 128
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="gpt",version="1"} 5400
# HELP nv_gpu_utilization GPU utilization rate
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="0"} 0.5
# HELP vllm:request_success_total Count of successfully processed requests
# TYPE vllm:request_success_total counter
vllm:request_success_total{model_name="gpt"} 7
"""


class Read:
    def collect(self):
        return text_string_to_metric_families(TEXT)


for family in Read().collect():
    for sample in family.samples:
        print(f"read as {sample.name}: {sample.value}")
registry = CollectorRegistry()
registry.register(Read())
labels = {"model": "gpt", "version": "1"}
print("value of nv_inference_request_success:", registry.get_sample_value("nv_inference_request_success", labels))
for line in generate_latest(registry).decode().splitlines():
    if not line.startswith("#"):
        print("written:", line)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prometheus-client==0.26.0
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf "Samples of Triton's and vLLM's metrics in prometheus_client 0.26.0\n%s\n" "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
read as nv_inference_request_success_total: 128
read as nv_inference_queue_duration_us_total: 5400
read as nv_gpu_utilization: 0.5
read as vllm:request_success_total: 7
value of nv_inference_request_success: None
written: nv_inference_request_success_total{model="gpt",version="1"} 128.0
written: nv_inference_queue_duration_us_total{model="gpt",version="1"} 5400.0
written: nv_gpu_utilization{gpu_uuid="0"} 0.5
written: vllm:request_success_total{model_name="gpt"} 7.0
SEEN
