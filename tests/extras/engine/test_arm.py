"""The compiled step on an ARM processor that qemu emulates, compared with this one's."""

import mmap
import shutil
import subprocess
from ctypes import CDLL, addressof, c_long, c_void_p, cast, memmove, sizeof
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmini import files
from gptmini.extras.engine import build, packing
from gptmini.extras.engine.step import NativeStep, _Layer
from gptmini.generate.precision import PRECISIONS, round_weights
from gptmini.model.gpt import GPT
from tests.extras.engine.samples import LENGTH, models, run, step_of

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
START, SIZE = 1 << 40, 1 << 28  # both processes map a file here, so that they share pointers
SHARED = f"{SIZE}, {mmap.PROT_READ | mmap.PROT_WRITE}, {mmap.MAP_SHARED | 0x10}"  # MAP_FIXED
MAIN = f"""
#include "{build.SOURCE_FILES[0]}"
#include <fcntl.h>
#include <sys/mman.h>
int main(int, char** words) {{
  long* a = (long*)mmap((void*){START}, {SHARED}, open(words[1], O_RDWR), 0);
  int *tokens = (int*)a[2], *rows = (int*)a[3], *positions = (int*)a[4], *wanted = (int*)a[6];
  gptmini_step((Model*)a[0], a[1], tokens, rows, positions, a[5], wanted, (float*)a[7]);
}}"""


class ArmStep(NativeStep):
    """A step whose memory is the file, and each of whose calls is an emulated process."""

    def __init__(self, command: list[str], model: GPT, weights: str) -> None:
        self._command, self._end = command, START + 64  # behind the arguments of a call
        cache = packing.create_cache(model.config, weights, 1, spare_positions=LENGTH)
        super().__init__(build.build_library(files.DEFAULT_CACHE_DIR), model, weights, cache)
        g, self._function = self._model, self._call
        g.layers = cast(
            self._put(addressof(g.layers[0]), g.n_layer * sizeof(_Layer)), type(g.layers)
        )

    def _put(self, address: int, size: int) -> int:
        place, self._end = self._end, self._end + (size + 63) // 64 * 64
        memmove(place, address, size)
        return place

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        address = super()._pointer(tensor)
        return address and self._put(address, self._referenced[-1].nbytes)

    def _call(self, _, M, tokens, rows, positions, N, wanted, logits) -> None:
        g, found = (self._put(addressof(self._model), sizeof(self._model)), self._end)
        self._put(logits.value, self._logits.nbytes)
        inputs = [self._put(each.value, 4 * M) for each in (tokens, rows, positions, wanted)]
        (c_long * 8).from_address(START)[:] = [g, M, *inputs[:3], N, inputs[3], found]
        subprocess.run(self._command, check=True)
        memmove(logits.value, found, self._logits.nbytes)


@pytest.mark.skipif(None in (COMPILER, EMULATOR), reason="no g++-aarch64-linux-gnu, qemu-user here")
def test_the_step_computes_on_arm_what_it_does_here_in_slices_too(tmp_path: Path):
    program, memory = tmp_path / "program", tmp_path / "memory"
    command = [COMPILER, "-O3", "-fopenmp", "-static", "-xc++", "-", "-o", program]
    subprocess.run(command, input=MAIN.encode(), capture_output=True, check=True)
    with memory.open("w+b") as file:
        file.truncate(SIZE)
        words = map(int, [*SHARED.split(", "), file.fileno(), 0])
        CDLL(None).mmap(c_void_p(START), *map(c_long, words))

    @settings(max_examples=20, deadline=None)
    @given(model=models(), weights=st.sampled_from(list(PRECISIONS)))
    def compare(model: GPT, weights: str) -> None:
        round_weights(model, weights)
        tokens = torch.randint(model.config.vocab_size, (LENGTH,)).tolist()
        step = ArmStep([EMULATOR, program, memory], model, weights)
        expected, found = (run(each, tokens) for each in (step_of(model, weights), step))
        off = float((found - expected).norm() / expected.norm())
        assert off < {"float32": 1e-6, "bfloat16": 5e-3, "int8": 2e-3}[weights]
        slices = [run(step, tokens[a:b], 0, a) for a, b in ((0, 1), (1, 10), (10, LENGTH))]
        assert torch.equal(torch.cat(slices), found)

    compare()
