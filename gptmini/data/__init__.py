"""From files of text to verified files of tokens.

Read corpus.py first, the whole way of a text; then sources.py (which files), formats.py (how each
is read), chats.py (conversations, of which answers are learned) and token_file.py (what training
reads). fetch.py downloads known texts.
Which tokens a step reads is decided in train/batches.py.
"""
