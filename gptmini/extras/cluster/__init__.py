"""Plans a training run for accelerators that one does not have: `gptmini size --accelerator`.

For those who are about to rent a machine. Without this folder `gptmini size` plans for this machine
only.

report.py estimates a run; cluster.py finds what one of many ranks holds, sends and computes.
"""
