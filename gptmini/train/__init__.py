"""From a plan to a trained run: the training loop, its checkpoints, and how good a model is.

Read state.py first, what the loop works on; build.py makes it from a plan. Then read loop.py (the
loop), step.py (one update), batches.py (which windows of the text a step reads), evaluate.py (the
loss on held-out text; validate.py calls it) and checkpoint.py (a run created, resumed, saved). What
the user sees goes through reporter.py.

gradients.py adds those of a step, group.py has what several processes do otherwise, and
cuda_graph.py repeats passes on a GPU: skip them at first. api.py is `gptmini.fit`, all of it in a
function, and evaluate_run.py measures a trained run.
"""
