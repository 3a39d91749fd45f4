"""A run in the formats of other programs, and their models as runs.

Read architectures.py first, whose settings and tensors are called what; then folding.py (weights
rewritten to fit), huggingface.py and gguf.py (the files), and export.py, which writes a run and
proves what it wrote.
"""
