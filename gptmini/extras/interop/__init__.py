"""A run in the formats of other programs, and their models as runs.

For those who run a model in transformers, llama.cpp or Ollama, or begin from a published one.
Without this folder `gptmini import` and `gptmini export` are lost; `inspect` still writes pages.

Read architectures.py first, the names of settings and tensors; then folding.py (weights rewritten
to fit) and the files: huggingface.py, gguf.py, gguf_reader.py, gguf_tokenizer.py and
adopt.py (the tokenizer of another model). hub_model.py downloads a model by its name,
import_model.py makes a run of it, and export.py writes a run and proves what it wrote.
"""
