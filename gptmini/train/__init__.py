"""The training loop and nothing else.

Read batches (which rows at which step), evaluate (the loss on held-out text), trainer (a step and
the loop), state (what is saved and restored). Gets its configuration and its tokens ready-made;
knows no file formats, no compiled engine and no reports.
"""
