"""Text to tokens and back: bytes, characters, byte-pair encodings.

Read `tokenizers`, then `bpe` (how an encoding is learned). `tokenizer_json` reads and writes the
file format of Hugging Face.
"""
