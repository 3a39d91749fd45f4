"""Makes generation fast on a GPU: a step is one CUDA graph, and its tokens are drawn on the GPU.

engine.py and sampler.py call these two, each in one place; without them a GPU generates the same
texts, up to rounding, and more slowly.
"""
