"""What GPUs of NVIDIA and AMD need to be quick: whole steps as CUDA graphs, and the draw of a step.

engine.py and sampler.py call these two, each in one place; without them a GPU generates the same
texts, up to rounding, and more slowly.
"""
