"""A run in the formats of other programs, and their models as runs.

Read architectures.py first, the names of settings and tensors; then folding.py (weights rewritten
to fit) and the files: huggingface.py, gguf.py, gguf_reader.py and gguf_tokenizer.py.
import_model.py makes a run of them, and export.py writes a run and proves what it wrote.
"""
