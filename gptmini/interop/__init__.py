"""A run in another form, and models of others as runs.

Read `architectures` (settings and names of tensors), `folding` (weights that fit them),
`huggingface` and `gguf` (their files), `export` (writes and proves), and `pooling`, which merges
key/value heads. The rooms before this one do not know about it.
"""
