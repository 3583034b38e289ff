"""The protobuf message of a SentencePiece model, with the fields that determine its IDs.

Source of the schema: google/sentencepiece, src/sentencepiece_model.proto. The library's own module
needs a release of protobuf that tritonclient does not support.
"""

import functools
from typing import Any

# SentencePiece.Type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# TrainerSpec.ModelType
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4

# A FileDescriptorProto. Enums are read as numbers.
_SCHEMA = """
name: "sentencepiece_model.proto" package: "slipway" syntax: "proto2"
message_type {
  name: "SentencePiece"
  field { number: 1 name: "piece" type: TYPE_STRING label: LABEL_OPTIONAL }
  field { number: 2 name: "score" type: TYPE_FLOAT label: LABEL_OPTIONAL }
  field { number: 3 name: "type" type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
}
message_type {
  name: "TrainerSpec"
  field { number: 3 name: "model_type" type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
  field { number: 24 name: "treat_whitespace_as_suffix" type: TYPE_BOOL label: LABEL_OPTIONAL }
  field { number: 35 name: "byte_fallback" type: TYPE_BOOL label: LABEL_OPTIONAL }
  field { number: 41 name: "bos_id" type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "1" }
  field { number: 42 name: "eos_id" type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "2" }
  field { number: 43 name: "pad_id" type: TYPE_INT32 label: LABEL_OPTIONAL default_value: "-1" }
  field {
    number: 44 name: "unk_surface" type: TYPE_STRING label: LABEL_OPTIONAL
    default_value: " \u2047 "
  }
}
message_type {
  name: "NormalizerSpec"
  field { number: 2 name: "precompiled_charsmap" type: TYPE_BYTES label: LABEL_OPTIONAL }
  field {
    number: 3 name: "add_dummy_prefix" type: TYPE_BOOL label: LABEL_OPTIONAL
    default_value: "true"
  }
  field {
    number: 4 name: "remove_extra_whitespaces" type: TYPE_BOOL label: LABEL_OPTIONAL
    default_value: "true"
  }
  field {
    number: 5 name: "escape_whitespaces" type: TYPE_BOOL label: LABEL_OPTIONAL
    default_value: "true"
  }
}
message_type {
  name: "ModelProto"
  field {
    number: 1 name: "pieces" type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".slipway.SentencePiece"
  }
  field {
    number: 2 name: "trainer_spec" type: TYPE_MESSAGE label: LABEL_OPTIONAL
    type_name: ".slipway.TrainerSpec"
  }
  field {
    number: 3 name: "normalizer_spec" type: TYPE_MESSAGE label: LABEL_OPTIONAL
    type_name: ".slipway.NormalizerSpec"
  }
  field {
    number: 5 name: "denormalizer_spec" type: TYPE_MESSAGE label: LABEL_OPTIONAL
    type_name: ".slipway.NormalizerSpec"
  }
}
"""


def read_sentencepiece(data: bytes) -> Any:
    """Return the content of a tokenizer.model, a ModelProto.

    Raises:
        ValueError: The content is something else.
    """
    from google.protobuf.message import DecodeError

    try:
        model = _message()()
        model.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"it is not a SentencePiece model: {error}") from error
    return model


@functools.cache
def _message() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("slipway.ModelProto"))
