"""Prompts in, texts out: sampling from a trained model.

Read `filters` (logits to one token), `sampler` (the loop), `texts` (one text on its way), `engine`
(prefill and the KV cache in torch), `run` (a trained model with its tokenizer), `bulk` and `batch`
(many texts). `ranking`, `native` (compiled) and `guess` make texts faster; `check` asks whether the
compiled step computes the model. The room does not know how the model was trained.
"""
