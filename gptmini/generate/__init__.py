"""Prompts in, texts out: sampling from a trained model.

Read sequence.py first, one text as it grows; then sampler.py (the loop from one token to the next),
filters.py (logits to one token) and engine.py (the model with its KV cache, and where faster
engines are opened). run.py ties a model to its tokenizer, and score.py says how likely a text is.
precision.py rounds weights.
"""
