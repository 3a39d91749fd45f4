"""What a training will take on this machine, and the choices that follow, before step 0.

Read `cost` (arithmetic), `memory` (two steps on fake tensors), `fit` (timing a step), `minutes`
(sizes for a given time), `base` (fine-tuning), `decide` (makes the configuration of a run),
`together` (on several processes), `size` (the report). Does not know the training loop.
"""
