"""Prompts in, texts out: sampling from a trained model.

Read sampler.py first, the loop from one token to the next; then filters.py (logits to one token),
sequence.py (one text as it grows) and engine.py (the model with its KV cache, and the door to
faster engines). run.py ties a model to its tokenizer, and score.py says how likely a text is.
precision.py rounds weights; ranking.py and speculative.py make it faster and change no text.
"""
