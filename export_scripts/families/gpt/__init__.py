"""The GPT layout and the sources that become it: GPT-2, OPT, BLOOM, Megatron-LM and NeMo.

GPT-J, GPT-NeoX and Llama have layouts of their own.
"""
