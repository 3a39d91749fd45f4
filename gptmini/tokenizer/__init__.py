"""Text to tokens and back: bytes, characters, byte-pair encodings.

Read tokenizers.py first, the interface with its two simplest kinds; then bpe.py (how an encoding is
learned) and bpe_tokenizer.py (how it is applied). load.py finds a tokenizer by its name or file,
choose.py picks one for a text, chunks.py cuts a long text for it, foreign.py runs those of other
models, byte_level.py knows how others write ours, and spelling.py shows tokens to people.
chat_template.py makes one text of the messages of a conversation.
"""
