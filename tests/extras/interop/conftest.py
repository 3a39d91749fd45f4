"""llama.cpp, which loads exports in the tests, in one thread."""

import pytest


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
