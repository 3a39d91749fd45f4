"""The GPT in plain PyTorch: tokens (B, T) in, logits (B, T, V) out, and its optimizers.

Read attention.py, layers.py and gpt.py, then optim.py. mechanisms.py derives attention step by
step, for readers and tests, and kernels.py computes three of torch's functions faster. Nothing here
knows files, devices, the environment or printing.
"""
