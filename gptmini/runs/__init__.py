"""A run on disk: checkpoints that are whole or absent, metrics, settings.

Read directory.py first, the files of a run and how they are saved; then tensors.py (files of
weights, whole or in shards) and log.py (metrics.jsonl and the trackers beside it). listing.py
summarizes many runs. Nothing here knows a model: tensors have names.
"""
