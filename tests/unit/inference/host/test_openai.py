"""Facts about models for OpenAI's API."""

from tritonclient.grpc import model_config_pb2

from inference.host.models import HostedModel
from inference.host.openai import model_facts_of


def test_limits_of_another_projects_model_are_the_engines(tmp_path):
    """Its inputs may have the same names; it must not keep the endpoint from opening."""
    config = model_config_pb2.ModelConfig(name="other", backend="python")
    facts = model_facts_of(HostedModel(config, "1"), tmp_path)
    assert (facts.context_len, facts.vocab_size) == (4096, None)
