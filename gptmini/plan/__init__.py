"""Plan a training run before step 0: what it costs, what fits the machine, what the run chooses.

Read settle.py first, where a plan is made from top to bottom: reconcile.py reads the run that is
resumed or the base, then the text is opened, then five steps settle what is open. These ask
minutes.py (sizes and steps for a given time, by the figures of estimates.py), recipe.py (learning
rates, weight decay, dropout and tying, by the risk of overfitting) and timing.py (the machine: the
time of a step, threads, rows per pass, torch.compile), and these cost.py (arithmetic). A `Plan`
comes out, which train/ follows.
"""
