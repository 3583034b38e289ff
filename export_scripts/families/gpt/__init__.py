"""The GPT layout, and its sources: GPT-2, OPT, BLOOM, Megatron-LM, NeMo, megatron-core."""
