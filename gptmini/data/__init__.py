"""From files to documents to verified token files.

A text flows through `sources` (which files), `formats` (how each is read), `corpus` (split, encode,
cache) and `token_file`. `shards` prepares token files in parts on many machines; `fetch` downloads
known corpora.
"""
