"""Prompts in, texts out: sampling from a trained model.

Read `filters` (logits to one token), `sampler` (the loop), `texts` (one text as it grows), `engine`
(prefill and the KV cache in torch), `run` (a trained model with its tokenizer), `chat` (prompts of
instruct models) and `prompts_file` (many prompts from a file). Three files make it faster and
change no text: `ranking` (top-k and top-p without sorting the vocabulary), `speculative` (drafting
tokens ahead) and `native/` (the forward pass in C++). Nothing here knows how the model was trained.
"""
