"""A run on disk: checkpoints that are whole or absent, metrics, settings.

Read tensors (files of weights, whole or in shards), directory (the files of a run, saving and
loading), then log (metrics.jsonl and the trackers beside it). Knows tensors by name, and no model.
"""
