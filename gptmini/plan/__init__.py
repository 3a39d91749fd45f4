"""What a training will take here, and so what to choose: everything decided before step 0.

Read cost (arithmetic), memory (two steps on fake tensors), fit (timing a step), minutes (sizes for
a given time), decide (the one function that makes a run's configuration), size (the report).
Knows neither checkpoints nor the training loop.
"""
