"""Facts about models, and configurations that cannot be served."""

from typing import Any

import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from inference.front.rules import parts_of_path
from inference.host.describe import api_description, config_json, config_message, model_metadata
from inference.host.models import HostedEnsemble, HostedModel


def model_of(name: str, **fields: Any) -> HostedModel:
    tensors = [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}]
    about = {"name": name, "input": tensors, "output": tensors, **fields}
    return HostedModel(json_format.ParseDict(about, model_config_pb2.ModelConfig()), "1")


def test_metadata_and_configuration_say_what_is_served():
    model = model_of("m", parameters={"data_type": {"string_value": "fp16"}})
    assert "parameters" not in model_metadata(model)
    model.about = {"checkpoint": "abc", "data_type": "fp16"}
    assert model_metadata(model)["parameters"] == model.about
    parameters = config_json(model)["parameters"]
    assert parameters["slipway_checkpoint"] == {"string_value": "abc"}
    assert parameters["data_type"] == {"string_value": "fp16"}
    assert config_message(model).parameters["slipway_data_type"].string_value == "fp16"
    assert set(model.config.parameters) == {"data_type"}


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_ensemble_answers_as_often_as_its_steps(decoupled):
    policy = {"model_transaction_policy": {"decoupled": True}}
    step = {"model_name": "inner", "input_map": {"x": "x"}, "output_map": {"x": "x"}}
    outer = model_of(
        "outer", ensemble_scheduling={"step": [step]}, **(policy if decoupled else {})
    ).config
    models = {"inner": model_of("inner", **policy)}
    if decoupled:
        assert HostedEnsemble(outer, "1", models).decoupled
        return
    with pytest.raises(ValueError, match=r"config\.pbtxt of outer: .*inner .*decoupled"):
        HostedEnsemble(outer, "1", models)


def test_every_path_of_the_description_is_open_and_every_body_described():
    found = api_description()
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            named = path.format(model="m", version="1")
            assert parts_of_path(method.upper(), named) is not None, path
            assert [each["name"] for each in operation["parameters"]] == [
                name for name in ("model", "version") if f"{{{name}}}" in path
            ]
            if method == "post":
                schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert schema.rpartition("/")[2] in found["components"]["schemas"]
    fields = found["components"]["schemas"]
    assert fields["SentTensor"]["required"] == ["name", "datatype", "shape"]
    assert fields["GenerateRequest"]["additionalProperties"] is True
