"""Plan a training run before step 0: what it costs, what fits the machine, what the run chooses.

Read `cost` (arithmetic), `memory` (two steps on fake tensors), `timing` (steps on the machine),
`minutes` (sizes and steps for a given time), `finetune` (what a run takes from its base),
`decision` and `decide` (make a run's configuration), `broadcast` (the same on several processes),
`cluster` (many accelerators, planned without any), `report` (what `gptmini size` prints). Nothing
here knows the training loop.
"""
