"""Files to documents to checked token files.

A text flows through `sources` (which files), `formats` (how each is read), `corpus` (split, encode,
cache) and `token_file`. `shards` are token files prepared in parts on many machines; `fetch`
downloads known corpora.
"""
