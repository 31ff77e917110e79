"""Text to Megatron's `.bin/.idx` files with a manifest, and the checks of such files before training.

`prepare` is the command line. Needs numpy and the package of the tokenizer, but neither torch nor megatron.
"""
