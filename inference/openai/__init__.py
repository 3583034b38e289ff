"""An endpoint that speaks OpenAI's protocol, next to Triton's: a process of its own.

Text and token ids are translated here with the served tokenizer; the served model is asked over
gRPC. What a field means was read in OpenAI's API reference.
"""
