"""OpenAI's protocol, on a port of its own.

It translates between text and token ids with the served tokenizer, and runs the served model.
Fields mean what OpenAI's API reference says.
"""
