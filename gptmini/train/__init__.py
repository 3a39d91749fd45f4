"""The training loop and nothing else.

Read trainer.py first, the loop; then step.py (one update), evaluate.py (the loss on held-out text)
and batches.py (which windows of the text a step reads). state.py says what the loop works on and a
checkpoint holds; build, checkpoint, create and resume bring it from a decision or a run on disk to
there, and messages is what the user reads. api.py is all of it, for Python; convert.py starts a run
with fewer KV heads, and evaluate_run.py measures a trained one. Next comes generate/.
"""
