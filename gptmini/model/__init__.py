"""The GPT in plain PyTorch: tokens (B, T) in, logits (B, T, V) out.

Read gpt.py first, the model from top to bottom; then attention.py and layers.py, which its blocks
are made of, and cache.py, the keys and values that attention keeps when generating. induction.py
gives a new model its first skill. mechanisms.py writes out each kind of attention in a few lines,
optim.py has the optimizer and the learning rate's schedule, losses.py says how well the model
predicts each token of a text, kernels.py has what is not torch's: norm, dropout and loss, faster,
and compile.py calls torch.compile. Nothing here knows files, the environment or printing.
"""
