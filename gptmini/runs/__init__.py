"""A run on disk: checkpoints that are whole or absent, metrics, settings.

Read directory.py first, the files of a run and how they are saved; then tensors.py (files of
weights), progress.py (what state.json holds) and log.py (metrics.jsonl and the trackers beside it).
write.py makes a run of weights from elsewhere. Apart from it, nothing here knows a model: tensors
have names.
"""
