"""Generating on a CPU with a C++ compiler: the forward pass in C++.

`engine` decides what is computed, `step` hands it to the compiled library, `build` compiles that
from `decode.cpp` and its headers, and `precision` stores weights in bfloat16 or int8.
"""
