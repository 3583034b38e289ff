"""OpenAI's protocol, at a port of its own.

It translates between text and token ids with the served tokenizer, and asks the served model. The
meaning of each field is that of OpenAI's API reference.
"""
