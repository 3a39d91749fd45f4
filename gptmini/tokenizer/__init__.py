"""Text to tokens and back: bytes, characters, byte-pair encodings.

Read `tokenizers` (the interface, bytes and characters), `bpe` (how an encoding is learned),
`bpe_tokenizer` (how it is applied) and `chunks` (how a long text is cut for it). `load` makes a
tokenizer from its name, a text or a file, `choose` picks one for a text, `tokenizer_json` reads and
writes the file format of Hugging Face, and `spelling` shows tokens to people.
"""
