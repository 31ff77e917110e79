"""From text to Megatron's `.bin/.idx` with a manifest, and the checks that refuse anything else.

    sources      documents out of folders, text files, jsonl and tar archives
    tokenizers   SentencePiece (trained here or given), Hugging Face, GPT-2 BPE
    indexed      Megatron's binary format: writer, reader, structural checks
    manifest     what a prepared folder says about itself
    verify       the checks behind `prepare_data.py verify` and the training driver's start
    prepare      the pipeline and its command line

Needs numpy, and the tokenizer's own package; neither torch nor megatron.
"""
