"""Plan a training run before step 0: what it costs, what fits the machine, what the run chooses.

Read decide.py first, where a run's configuration is made, stage by stage; then what its stages ask:
cost.py (arithmetic), memory.py (a dry run), timing.py (steps on this machine), minutes.py (sizes
for a given time, by the figures of estimates.py), recipe.py (learning rates, weight decay, dropout
and tying, by the risk that overfitting.py computes) and finetune.py (what a run takes from its
base). broadcast.py does it once for several processes; cluster.py and report.py are for `gptmini
size`. Next comes train/, which takes the decision as it is.
"""
