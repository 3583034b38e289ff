"""The Llama layout and the sources that become it: Hugging Face, Megatron-LM and NeMo.

Megatron settings shared with GPT are in `families.gpt` and `families.mapping`.
"""
