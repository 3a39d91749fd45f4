"""Generate faster: the forward pass in C++ on a CPU, recorded steps on a GPU, drafted tokens.

The core opens engines by `gptmini.generate.engine.open_engine`, which asks `door`; without this
folder PyTorch generates the same texts, up to rounding, and more slowly. An engine knows by
`fingerprint` that its model was changed.

On a CPU with a C++ compiler, read `native_engine` (which tokens of which texts pass through the
model), `step` (the call into the compiled library), `packing` (how weights and keys are stored) and
`decode.cpp` with its headers `product.h` and `attention.h`. `build` compiles them; `check` compares
the result with the model. On a GPU, read `gpu_engine`: a step is one CUDA graph (`graphs`), and its
tokens are drawn on the GPU (`device_draw`). With `--lookup` and `--draft`, `speculative` has any
engine verify several drafted tokens in a pass; without this folder these are lost.
"""
