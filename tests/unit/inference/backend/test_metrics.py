"""The times of a request, the names of the metrics, and the dashboard that shows them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from inference.backend import metrics
from inference.backend.instances import Instance
from inference.engine.load import EngineLoad, RequestTimes

ROOT = Path(__file__).resolve().parents[4]
NAMES = {f"{e.name}_bucket" if e.kind == "HISTOGRAM" else e.name for e in metrics.METRICS}


def test_the_times_of_a_request_follow_from_its_moments():
    times = RequestTimes(10.0)
    assert (times.queued_s, times.first_token_s, times.between_tokens_s) == (None, None, None)
    times.began = 11.0
    for moment in (12.0, 12.0, 12.5, 13.5):  # two rows got a token in the first step
        times.note_token(moment)
    assert times.queued_s == 1.0
    assert times.first_token_s == 2.0
    assert times.between_tokens_s == pytest.approx(0.75)
    assert (times.prefill_s, times.decode_s) == (1.0, 1.5)
    assert times.steps == 3


def test_names_are_by_prometheus_conventions():
    for each in metrics.METRICS:
        assert re.fullmatch(r"slipway_[a-z]+(_[a-z]+)*", each.name)
        assert each.name.endswith("_total") == (each.kind == "COUNTER")
        assert each.kind != "HISTOGRAM" or each.name.endswith(("_seconds", "_tokens"))


def test_requests_and_load_change_the_metrics_of_their_rows():
    load = EngineLoad(running=2, slots=4, prompt_tokens=5)
    kept = metrics.ModelMetrics("m", Instance(1, 2), lambda: load, {"version": "7"})
    times = RequestTimes(10.0, began=11.0, generated_tokens=3, reasons=("end", "stop"))
    kept.completed(2.0, times)
    kept.refused("busy")
    found = metrics.exposition([*kept.read()])
    lines = {line.replace('{model="m",engine="1"', "{") for line in found}
    assert lines >= {
        "slipway_running_sequences{} 2",
        "slipway_cache_used_ratio{} 0.5",
        "slipway_prompt_tokens_total{} 5",
        'slipway_requests_total{,outcome="completed"} 1',
        'slipway_requests_total{,outcome="failed"} 0',
        'slipway_requests_refused_total{,reason="busy"} 1',
        'slipway_sequences_finished_total{,reason="stop"} 1',
        "slipway_server_restarts_total{} 0",
        "slipway_request_duration_seconds_sum{} 2",
        'slipway_request_queue_seconds_bucket{,le="1"} 1',
        "slipway_request_prefill_seconds_count{} 0",
        "slipway_request_generated_tokens_sum{} 3",
        'slipway_model_info{,version="7"} 1',
    }


def test_the_dashboard_shows_every_metric_and_no_other():
    dashboard = json.loads((ROOT / "docker" / "grafana_dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {name for each in expressions for name in re.findall(r"slipway_\w+", each)} == NAMES
    chosen = r'slipway_\w+\{namespace=~"\$namespace", model=~"\$model"\}'
    for each in expressions:
        assert not re.search(r"slipway_\w+", re.sub(chosen, "", each)), each
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", "model"]


def test_the_alerts_are_about_metrics_that_there_are():
    (group,) = yaml.safe_load((ROOT / "docker" / "alert_rules.yaml").read_text())["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"slipway_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= NAMES, rule["alert"]
        assert {"summary", "description"} <= set(rule["annotations"])
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_share_of_the_cache_is_from_0_to_1():
    assert EngineLoad().cache_share == 0
    assert EngineLoad(running=3, slots=4).cache_share == 0.75
    assert EngineLoad(running=3, slots=4, blocks=10, blocks_used=5).cache_share == 0.5


def test_the_document_names_every_metric():
    text = (ROOT / "docs" / "serving.md").read_text()
    assert not {name.removesuffix("_bucket") for name in NAMES} - set(
        re.findall(r"slipway_\w+", text)
    )


METRICS = """\
# HELP slipway_request_prompt_tokens Tokens of a request's prompts
# TYPE slipway_request_prompt_tokens histogram
slipway_request_prompt_tokens_bucket{model="a",le="1"} 0
slipway_request_prompt_tokens_sum{model="a"} 7
slipway_slots{model="slipway_slots "} 4
slipway_prompt_tokens_total{model="a",engine="1"} 7
nv_inference_count{model="a",version="1"} 1
"""


def test_metrics_may_have_the_names_of_vllm():
    assert (
        "\n".join(map(metrics.vllm_line, METRICS.split("\n")))
        == """\
# HELP vllm:request_prompt_tokens Tokens of a request's prompts
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{model_name="a",le="1"} 0
vllm:request_prompt_tokens_sum{model_name="a"} 7
slipway_slots{model="slipway_slots "} 4
vllm:prompt_tokens_total{model_name="a",engine="1"} 7
nv_inference_count{model="a",version="1"} 1
"""
    )
    names = [each.vllm for each in metrics.METRICS if each.vllm != "-"]
    assert len(set(names)) == len(names)
