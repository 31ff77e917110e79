"""The Megatron plug-in: our layers inside megatron-core 0.19.2's GPT. The only folder that imports megatron.

Seams: `specs.block_spec` (a callable for `GPTModelConfig.transformer_layer_spec` and for `--spec`), `moe_layer` (the
whole layer), `local_experts` (an `experts` builder for Megatron's own MoELayer), `cpu` (CPU with gloo as a device).
"""
