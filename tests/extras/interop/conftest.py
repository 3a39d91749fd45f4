"""The other programs that load exports: only where a test asks for them, and in one thread."""

import pytest

from gptmini.extras.interop import export as exporting
from gptmini.extras.interop.export import generate_by_llama_cpp, generate_by_transformers


@pytest.fixture(scope="module", autouse=True)
def no_other_program(only_read_back: None) -> None:
    """Below, `other_programs` brings them back."""


@pytest.fixture
def other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "generate_by_transformers", generate_by_transformers)
    monkeypatch.setattr(exporting, "generate_by_llama_cpp", generate_by_llama_cpp)


@pytest.fixture(autouse=True)
def one_thread_for_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for each other in loops, on cores of others."""
    try:
        import xllamacpp
    except ImportError:
        return
    create = xllamacpp.CommonParams

    def create_with_one_thread() -> object:
        params = create()
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        return params

    monkeypatch.setattr(xllamacpp, "CommonParams", create_with_one_thread)
