"""Several processes that train one model, started by torchrun.

Read group (how they find each other, agree and fail), gradients (how their gradients are added, to
the same bits on any number of them), placement (each holds the whole model, or) sharding (some rows
of it), rows (how these match a whole one to the bit), then checkpoints (how all save and load).
Only this package reads torchrun's variables; the model knows none of it.
"""
