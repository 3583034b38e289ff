"""Durations of the engine in the place of those that Triton stops too early."""

from __future__ import annotations

from inference.front.kserve_http import with_engine_durations

TRITON = """\
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds
nv_inference_request_success{model="gpt",version="1"} 4
nv_inference_request_duration_us{model="gpt",version="1"} 900
nv_inference_request_duration_us{model="preprocessing",version="1"} 70
nv_inference_queue_duration_us{model="gpt",version="1"} 80
nv_inference_compute_input_duration_us{model="gpt",version="1"} 5
nv_inference_compute_infer_duration_us{model="gpt",version="1"} 700
"""
ENGINE = """\
slipway_request_duration_seconds_count{model="gpt"} 4
slipway_request_duration_seconds_sum{model="gpt"} 2.5
slipway_request_queue_seconds_sum{model="gpt"} 0.25
"""


def test_durations_of_a_model_with_an_engine_are_its_own() -> None:
    lines = with_engine_durations(TRITON + ENGINE).splitlines()
    changed = {
        'nv_inference_request_duration_us{model="gpt",version="1"} 2500000',
        'nv_inference_queue_duration_us{model="gpt",version="1"} 250000',
        'nv_inference_compute_infer_duration_us{model="gpt",version="1"} 2250000',
    }
    assert set(lines) - set((TRITON + ENGINE).splitlines()) == changed
    assert len(lines) == len((TRITON + ENGINE).splitlines())


def test_durations_of_a_models_instances_are_summed() -> None:
    engines = "".join(ENGINE.replace('"gpt"', f'"gpt",engine="{i}"') for i in range(2))
    assert (
        'nv_inference_request_duration_us{model="gpt",version="1"} 5000000'
        in with_engine_durations(TRITON + engines).splitlines()
    )


def test_models_without_an_engine_are_left_as_they_are() -> None:
    assert with_engine_durations(TRITON) == TRITON
    other = ENGINE.replace("gpt", "another")
    assert with_engine_durations(TRITON + other) == TRITON + other
