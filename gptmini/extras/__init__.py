"""Guests: parts that nobody needs to train a GPT and to generate with it.

The core never imports them, and no guest imports another: the commands load a guest when they run.
Without this folder everything else still works.
"""
