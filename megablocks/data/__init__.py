"""Convert text to Megatron's `.bin/.idx` files with a manifest, and check such files before training.

    sources      read documents from folders, text files, jsonl files and tar archives
    tokenizers   SentencePiece (trained here or given), Hugging Face, GPT-2 BPE
    indexed      Megatron's binary format: writer, reader, structural checks
    manifest     the description of a prepared folder
    pipeline     tokenize documents in several processes
    verify       the checks of `prepare_data.py verify` and of the training driver's start
    prepare      the command line

Needs numpy and the package of the tokenizer, but neither torch nor megatron.
"""
