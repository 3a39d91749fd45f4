"""Plans a training run that is not trained, for this machine or for accelerators: `gptmini size`.

For those who choose a size, or are about to rent a machine. Without this folder `gptmini size` is
lost; `gptmini train` still says what a run takes before it begins.

report.py estimates a run on this machine and prints it. plans.py computes what one of many ranks
holds, sends and computes, and describes it.
"""
