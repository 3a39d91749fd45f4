"""From files of text to verified files of tokens.

Read corpus.py first, the whole way of a text; then text.py (which files), formats.py (how each is
read), chats.py (conversations) and token_file.py (what training reads). hub_dataset.py chooses
files of a dataset on the Hugging Face Hub, hub.py brings them, and fetch.py downloads known texts.
Which tokens a step reads is decided in train/batches.py.
"""
