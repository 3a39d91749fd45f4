"""Several processes that train one model, started by torchrun.

`join_group` of gptmini/train/group.py calls it: without this folder one process trains a model.

Read group.py first, the verbs of a process among several; ranks.py is how they find each other,
agree and fail, and planning.py how they get one plan. gradients.py adds gradients over models that
are whole on each rank, with the same bits on any number of them; sharding.py divides a model.
"""
