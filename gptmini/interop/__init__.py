"""A run in the formats of other programs, and their models as runs.

Read `architectures` (names of settings and tensors), `folding` (weights rewritten to fit them),
`huggingface`, `gguf` and `gguf_reader` (the files), `import_model` (makes a run of them) and
`export` (writes a run and proves what it wrote). No package before this one knows about it.
"""
