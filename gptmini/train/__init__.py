"""The training loop and nothing else.

Read batches (which rows at which step), evaluate (the loss on held-out text), trainer (a step and
the loop), state (what is saved and restored), messages (what the user reads). These get their
configuration and tokens ready-made, and know no file formats, no compiled engine and no reports.
fit is all of it, for Python.
"""
