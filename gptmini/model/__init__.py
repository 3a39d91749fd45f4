"""The GPT in plain PyTorch: tokens (B, T) in, logits (B, T, V) out, and its optimizers.

Read gpt.py, attention.py, layers.py, then optim.py; mechanisms.py derives attention step by step,
kernels.py computes two of torch's functions faster, scaling.py stretches rotary frequencies as
Llama 3.1 does, and rows.py is for a model in parts.
This room knows no files, devices, environment or printing.
"""
