"""Several processes that train one model, started by torchrun.

`join_group` of gptmini/train/group.py calls it: without this folder one process trains a model.

Read group.py first, the verbs of a process among several; ranks.py is how they find each other,
agree and fail, and planning.py how they get one plan. replicas.py shares a batch among models that
are whole on each rank, with the same bits on any number of them, also on one that asks for them
(`load_replicas` of gptmini/doors.py); sharding.py divides a model.
"""
