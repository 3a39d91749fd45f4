"""The GPT in plain PyTorch: tokens (B, T) in, logits (B, T, V) out.

Read gpt.py first, the model from top to bottom; then attention.py and layers.py, which its blocks
are made of. induction.py gives a new model its first skill. mechanisms.py writes out each kind of
attention in a few lines, optim.py is what trains the model, losses.py says how well it predicts
each token of a text, and kernels.py computes three of torch's functions faster. Next comes train/.
Nothing here knows files, devices, the environment or printing.
"""
