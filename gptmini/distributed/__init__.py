"""Several processes that train one model, started by torchrun.

Read group.py first: how they find each other, agree and fail. Then gradients.py (sums with the same
bits on any number of processes) and placement.py (each holds the model whole, or in shards, with
sharding.py); checkpoint_store.py saves and loads either way. Only this package reads torchrun's
variables; the model knows none of it.
"""
