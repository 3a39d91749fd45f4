"""A run on disk: checkpoints that are complete or absent, metrics, settings.

Read `directory` (the files of a run, saving and loading), then `log` (metrics.jsonl and the
trackers beside it). Knows tensors by name, but no model.
"""
