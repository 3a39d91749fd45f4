"""Plans a training run for accelerators that one does not have: `gptmini size --accelerator`.

For those who are about to rent a machine. Without this folder `gptmini size` plans for this machine
only.

plans.py computes what one of many ranks holds, sends and computes; report.py describes it.
"""
