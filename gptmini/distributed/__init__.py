"""Several processes that train one model, started by torchrun.

Read ranks (how they find each other, agree and fail), gradients (how their gradients are added, to
the same bits on any number of them), then sharding (each holds some rows of the weights). The only
room that reads RANK and its kin; the model knows none of it.
"""
