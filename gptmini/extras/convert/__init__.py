"""Turns a trained model into one with fewer KV heads or a window, for a shorter training.

For those who want a smaller KV cache without training from the start. Without this folder `gptmini
convert` is lost. convert.py says how heads are pooled, and how the new run trains.
"""
