"""Facts about models for OpenAI's API."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc import model_config_pb2

from inference.front.openai import served


def test_limits_of_another_projects_model_are_the_engines(tmp_path: Path) -> None:
    """Its inputs may have the same names; it must not keep the endpoint from opening."""
    config = model_config_pb2.ModelConfig(name="other", backend="python")
    assert served._model_limits(config, tmp_path) == (4096, None)
