"""Generate faster on a CPU: the forward pass in C++, where a compiler is installed.

Read `engine` (which tokens of which texts pass through the model), `step` (the call into the
compiled library), `precision` (how weights and keys are stored) and `decode.cpp` with its headers
`product.h` and `attention.h`. `build` compiles them; `check` compares the result with the model.
"""
