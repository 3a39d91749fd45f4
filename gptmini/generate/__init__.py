"""Prompts in, texts out: sampling from a trained model.

Read sampler.py first, the loop from one token to the next; then filters.py (logits to one token),
texts.py (one text as it grows) and engine.py (the model with its KV cache). run.py ties a model to
its tokenizer, chat.py keeps a conversation within its context, and prompts_file.py reads many
prompts. score.py says how likely a text is, and attention_maps.py what the model looks at.
fingerprint.py notices that a model was changed. The others make it faster and change nothing but
rounding: ranking.py and speculative.py, native/ (the forward pass in C++) and gpu/.
"""
