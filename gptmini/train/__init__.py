"""The training loop and nothing else.

Read batches (which rows at which step), step (one update), trainer (the loop around it), evaluate
(the loss on held-out text), then state (what a checkpoint holds), build (a training run at step 0),
checkpoint (saved and restored), create and resume (the run on disk), and messages (what the user
reads). These get their configuration and tokens ready-made, and know no file formats, no compiled
engine and no reports. api is all of it, for Python; convert starts a run with fewer KV heads.
"""
