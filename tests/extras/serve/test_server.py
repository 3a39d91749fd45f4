"""The server, over real sockets on this machine, mostly with OpenAI's own client."""

import asyncio
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
import torch

from gptmini.errors import MachineError
from gptmini.extras.engine import door
from gptmini.extras.engine.native_engine import NativeEngine
from gptmini.extras.serve import connection as connections
from gptmini.extras.serve import server
from gptmini.extras.serve.connection import Connection, Flow
from gptmini.extras.serve.limits import Limits
from gptmini.extras.serve.scheduler import Deliveries, Request, Scheduler
from gptmini.extras.serve.server import Server, listen
from gptmini.generate.engine import TorchEngine
from gptmini.generate.run import Run, load_run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.extras.serve.serving import alone, serving
from tests.samples import CHAT_TOKENIZER, run_of
from tests.support import tiny, train

ROUNDING = 2e-2  # nats; two ways to compute in bfloat16 differ by less
CONTEXT = 400
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
HTTP = httpx.Client(timeout=600)  # a busy machine is not a failure
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session", autouse=True)
def closed() -> Iterator[None]:
    """Close the client at the very end; a worker may leave this file and come back."""
    with HTTP:
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    model = {"context_length": CONTEXT, "n_layer": 2}
    config = tiny(
        model=model,
        data={"path": str(folder / "text.txt")},
        train={"steps": 30, "seq_len": 16},
        sample={"top_k": None, "temperature": 1.2},
    )
    train(config, folder / "small")
    return folder / "small"


@pytest.fixture(scope="module")
def run(trained: Path) -> Run:
    return load_run(trained)


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with serving(run, max_rows=4) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_for(url: str, line: str) -> None:
    """Until /metrics has this line."""
    for _ in range(60_000):
        if line in HTTP.get(f"{url}/metrics").text.splitlines():
            return
        time.sleep(0.01)
    raise AssertionError(line)


def test_a_completion_is_what_generate_gives(run: Run, client: openai.OpenAI):
    answer = client.completions.create(model="small", prompt="the ", max_tokens=30, seed=5)
    (choice,) = answer.choices
    assert choice.text == alone(run, "the ", max_new_tokens=30, seed=5)
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens <= 30
    assert client.models.list().data[0].id == answer.model == "small"


def test_choices_prompts_and_tokens(run: Run, client: openai.OpenAI):
    settings = {"max_tokens": 12, "seed": 9, "temperature": 1.5}
    same_settings = {"max_new_tokens": 12, "seed": 9, "temperature": 1.5}
    answer = client.completions.create(model="small", prompt=["the ", "a"], n=3, **settings)
    prompts = ("the ", "a")
    expected = [alone(run, prompt, n, **same_settings) for prompt in prompts for n in range(3)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    tokens = [run.encode("the dog"), run.encode("a")]
    answer = client.completions.create(model="small", prompt=tokens, echo=True, **settings)
    expected = [prompt + alone(run, prompt, **same_settings) for prompt in ("the dog", "a")]
    assert [choice.text for choice in answer.choices] == expected
    answer = client.completions.create(model="small", prompt=tokens[0], **settings)
    assert answer.choices[0].text == alone(run, "the dog", **same_settings)


def test_a_stream_is_the_same_in_pieces(run: Run, client: openai.OpenAI):
    for echo in (False, True):
        chunks = list(
            client.completions.create(
                model="small",
                prompt="the quick",
                max_tokens=40,
                seed=1,
                n=2,
                echo=echo,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        for index in range(2):
            choices = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
            text = alone(run, "the quick", index, max_new_tokens=40, seed=1)
            expected = "the quick" + text if echo else text
            assert "".join(choice.text for choice in choices) == expected
            assert [choice.finish_reason for choice in choices].count(None) == len(choices) - 1
        assert chunks[-1].usage.completion_tokens > 2
        assert len(chunks) > 10


def test_stop_texts_and_bias(run: Run, client: openai.OpenAI):
    whole = alone(run, "the ", max_new_tokens=40, seed=3)
    stop = whole[5:7]
    answer = client.completions.create(
        model="small", prompt="the ", max_tokens=40, seed=3, stop=[stop]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    answer = client.completions.create(
        model="small", prompt="the ", max_tokens=5, logit_bias={"120": 100}, temperature=0
    )
    assert answer.choices[0].text == "xxxxx"


def test_log_probabilities_are_those_of_the_model(run: Run, client: openai.OpenAI):
    answer = client.completions.create(
        model="small", prompt="the fox", max_tokens=9, logprobs=3, seed=2, temperature=0.1
    )
    settings = {"max_new_tokens": 9, "seed": 2, "temperature": 0.1}
    (text,) = run.start(["the fox"], logprobs=True, **settings).finish()
    assert text.text.isascii()  # so that each token is a character
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(text.logprobs, abs=ROUNDING)
    assert len(found.tokens) == len(text.tokens)
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) in (3, 4)
        assert top[token] == logprob <= max(top.values())


PROMPTS = ["the quick brown fox " * 15, "é the"]


def scored(run: Run, prompt: str) -> list[float]:
    """Log-probabilities of a prompt's tokens after the first, by the model alone."""
    tokens = torch.tensor([run.encode(prompt)])
    with torch.inference_mode():
        logprobs = run.model(tokens).log_softmax(-1)  # (1, T, V)
    return logprobs[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(2))
def test_echo_scores_the_prompt(run: Run, client: openai.OpenAI, prompt: str):
    settings = {"prompt": prompt, "logprobs": 2, "temperature": 0, "echo": True}
    answer = client.completions.create(model="small", max_tokens=5, **settings)
    (choice,), n_prompt = answer.choices, len(run.encode(prompt))
    text = alone(run, prompt, max_new_tokens=5, temperature=0)
    assert text.isascii()  # so that each of its tokens is a character
    assert choice.text == prompt + text
    found = choice.logprobs
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    assert found.token_logprobs[1:n_prompt] == pytest.approx(scored(run, prompt), abs=ROUNDING)
    assert len(found.tokens) == n_prompt + len(text)
    names, tops = found.tokens[1:], found.top_logprobs[1:]
    for name, logprob, top in zip(names, found.token_logprobs[1:], tops, strict=True):
        assert len(top) in (2, 3)
        assert top[name] == logprob <= max(top.values())
    # Without new tokens the same is all there is.
    answer = client.completions.create(model="small", max_tokens=0, **settings)
    assert answer.choices[0].text == prompt
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.token_logprobs == found.token_logprobs[:n_prompt]
    assert answer.usage.completion_tokens == 0
    chunks = list(client.completions.create(model="small", max_tokens=5, stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    logprobs = [each for chunk in chunks for each in chunk.choices[0].logprobs.token_logprobs]
    assert logprobs == found.token_logprobs


def test_lm_eval_finds_the_log_likelihoods_of_the_model(run: Run, url: str):
    """Requests as lm-eval's local-completions sends them, and its reading of the answers."""
    words = "the quick brown fox jumps over the lazy dog. " * 10
    choices = [("the quick brown", " fox"), ("the quick brown", " dog"), ("over the ", "lazy")]
    choices += [(words[: CONTEXT - 5], words[CONTEXT - 5 : CONTEXT]), ("t", "he x")]
    pairs = [(run.encode(context), run.encode(end)) for context, end in choices]

    def post(batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        body = {"model": "small", "prompt": [context + end for context, end in batch]}
        body |= {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        found = []
        for choice, (context, _) in zip(answer.json()["choices"], batch, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            greedy = all(a == max(top.values()) for a, top in zip(logprobs, tops, strict=True))
            found.append((sum(logprobs), greedy))
        return found

    with ThreadPoolExecutor(3) as pool:
        batches = pool.map(post, [pairs[:2], pairs[2:4], pairs[4:]])
        found = [each for batch in batches for each in batch]
    for (context, end), (logprob, greedy) in zip(pairs, found, strict=True):
        with torch.inference_mode():
            logits = run.model(torch.tensor([context + end]))[0, len(context) - 1 : -1]  # (T, V)
        expected = logits.log_softmax(-1)[range(len(end)), end].sum()
        assert logprob == pytest.approx(float(expected), abs=ROUNDING * len(end))
        assert greedy == (logits.argmax(-1).tolist() == end)


@needs_compiler
def test_a_long_prompt_yields_to_running_texts():
    config = tiny(model={"context_length": CONTEXT, "n_layer": 4, "vocab_size": 257})
    torch.manual_seed(1)
    run = Run(Path("none"), config, ByteTokenizer(), GPT(config.model).eval())
    sample = run.build_sample_config({"max_new_tokens": 30, "seed": 2})
    prompts = {"short": "the", "long": "the quick fox " * 21}
    texts = {name: run.create_text(0, prompt, sample) for name, prompt in prompts.items()}
    order: list[str] = []
    done = threading.Event()

    def deliver(deliveries: Deliveries) -> None:
        for callback, events in deliveries:
            callback(events)
        if all(text.finish_reason for text in texts.values()):
            done.set()

    scheduler = Scheduler(run, max_rows=2, max_waiting=2, deliver=deliver)
    record = lambda name: lambda _: order.append(name)
    scheduler.submit([Request(text, None, False, record(name)) for name, text in texts.items()])
    scheduler.start()
    assert done.wait(600)
    scheduler.stop()
    # 294 tokens, 34 at a time; the last call takes what is left. The others get a token each time.
    assert order.index("long") == 294 // 34
    for name, prompt in prompts.items():
        assert texts[name].text == alone(run, prompt, max_new_tokens=30, seed=2)


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        ({"temperature": -1}, 400, "temperature: must be at least 0, not -1"),
        ({"best_of": 1, "suffix": None}, 400, "best_of: no such field"),
        ({"prompt": "x" * (CONTEXT + 1)}, 400, "prompt: 401 tokens"),
        ({"user": "\ud800"}, 400, "body: not valid JSON ('utf-8' codec can't encode character"),
        ({"stop": "a" * 1001}, 400, "stop.0: must have at most 1000 characters"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_in_openai_s_shape(url: str, wrong, status, message):
    body = json.dumps({"prompt": "x"} | wrong)
    answer = HTTP.post(f"{url}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == message.partition(":")[0]
    too_long = message == "prompt: 401 tokens"
    assert error["code"] == ("context_length_exceeded" if too_long else None)


HUGE = "x" * 900_000


@pytest.mark.parametrize(
    "wrong",
    [{HUGE: 1}, {"bias": {f"{HUGE[:900]}{n}": "1" for n in range(900)}}, {"temperature": HUGE}],
    ids=lambda wrong: str(wrong)[:20],
)
def test_refusals_repeat_little_of_what_was_sent(url: str, wrong):
    answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "x"} | wrong)
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": ', "body: not valid JSON"),
        (b"[" * 100_000, "body: not valid JSON"),
        (b'{"stop": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b"[1]", "body: must be a JSON object"),
    ],
    ids=range(4),
)
def test_bodies_that_are_no_requests(url: str, body: bytes, message: str):
    answer = HTTP.post(f"{url}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@contextmanager
def connection(url: str, data: bytes) -> Iterator[socket.socket]:
    """A connection to the server that has sent some bytes."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 600) as connection:
        connection.sendall(data)
        yield connection


def read_head(connection: socket.socket) -> str:
    """The first line of a response."""
    found = b""
    while b"\r\n" not in found:
        part = connection.recv(1 << 16)
        assert part
        found += part
    return found.partition(b"\r\n")[0].decode()


@pytest.mark.parametrize("length", ["9999999999999999999", "1048577"])
def test_a_body_that_says_it_is_too_long_is_not_waited_for(url: str, length: str):
    with connection(url, HEAD + f"Content-Length: {length}\r\n\r\n".encode()) as waiting:
        assert read_head(waiting).startswith("HTTP/1.1 413 ")


def test_a_body_in_chunks_that_gets_too_long_is_refused(url: str):
    chunks = (b" " * (1 << 16) for _ in range(17))
    assert HTTP.post(f"{url}/v1/completions", content=chunks).status_code == 413


@pytest.mark.parametrize(
    "rest",
    [
        CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length : 5\r\n\r\n",
        b"Host: localhost\r\nConnection: close\r\n\r\n",
    ],
)
def test_a_body_whose_end_a_proxy_may_see_elsewhere_is_refused(url: str, rest: bytes):
    with connection(url, HEAD + rest) as smuggler:
        assert read_head(smuggler).startswith("HTTP/1.1 400 ")
        smuggler.settimeout(10)  # the connection ends now, and not after 20 idle seconds
        while smuggler.recv(1 << 16):
            pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs the clock of threads")
def test_a_body_in_chunks_of_a_byte_leaves_the_server_to_others(url: str):
    (ident,) = (each.ident for each in threading.enumerate() if each.name == "http server")
    clock = time.pthread_getcpuclockid(ident)
    before = time.clock_gettime(clock)
    with connection(url, HEAD + CHUNKED + b"\r\n") as hostile:
        hostile.sendall(b"1\r\nx\r\n" * (1 << 19) + b"0\r\n\r\n")
        assert read_head(hostile).startswith("HTTP/1.1 400 ")
    assert time.clock_gettime(clock) - before < 1  # 0.1 s, where a parser in Python takes 3


def test_a_body_that_a_parser_drops_is_not_taken_for_an_empty_one(url: str):
    offer = {"connection": "Upgrade", "upgrade": "h2c"}
    answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=offer)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("upgrade: ")


def test_a_target_may_name_the_server(url: str):
    request = f"GET {url}/health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with connection(url, request) as absolute:
        assert read_head(absolute).startswith("HTTP/1.1 200 ")


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head",
    [
        GET + b"a:\r\n" * 10_000,
        GET + b"a: " + b"a" * 40_000,
        b"GET /" + b"a" * 40_000,
        HEAD + CHUNKED + b"\r\n1\r\nx\r\n0\r\n" + b"a:\r\n" * 10_000,
        b"\r\n" * 20_000,
    ],
    ids=["many headers", "one header", "target", "trailers", "empty lines"],
)
def test_a_head_without_end_is_refused(url: str, head: bytes):
    with connection(url, head) as endless:
        assert b"HTTP/1.1 431 " in read_all(endless)


def test_long_heads_are_read(url: str):
    target = "health?" + "a" * 15_000
    answer = HTTP.get(f"{url}/{target}", headers={"cookie": "a" * 15_000})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", GET, GET + b"\r\n", HEAD + b"Content-Length: 9\r\n\r\n", HEAD + CHUNKED + b"\r\n"]
)
def test_a_connection_without_requests_ends(run: Run, sent: bytes):
    with serving(run, read_seconds=1) as url, connection(url, sent) as idle:
        read_all(idle)  # ends, where it went on for ever


def test_bytes_of_a_head_do_not_prolong_its_time(run: Run):
    with (
        serving(run, read_seconds=1) as url,
        connection(url, GET) as slow,
        suppress(OSError),  # ended by the server
    ):
        while True:
            slow.sendall(b"a:b\r\n")
            time.sleep(0.1)


def test_a_request_has_its_time_from_its_head_on_and_each_wait_its_own(run: Run, monkeypatch):
    given: list[float] = []
    monkeypatch.setattr(Connection, "_end_in", lambda self, seconds: given.append(seconds))
    with (
        serving(run, read_seconds=3, request_seconds=70) as url,
        connection(url, 2 * (GET + b"\r\n")) as both,
    ):
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 2:
            found += both.recv(1 << 16)
    assert given == [3, 75, 75, 75, 3]  # two heads at once, and the end of each request


def test_few_requests_of_a_connection_are_read_before_they_are_answered(run: Run, monkeypatch):
    most = 0
    resume = Flow.resume_reading

    def note(flow: Flow) -> None:
        nonlocal most
        most = max(most, len(flow._connection.pipeline))
        resume(flow)

    monkeypatch.setattr(Flow, "resume_reading", note)
    n = 3000
    with serving(run) as url, connection(url, b"") as hasty:
        sender = threading.Thread(target=hasty.sendall, args=[(GET + b"\r\n") * n])
        sender.start()
        found = b""
        while found.count(b"HTTP/1.1 200 ") < n:
            found += hasty.recv(1 << 16)
        sender.join()
    assert most <= 16 + 4096 // len(GET)


def test_a_client_that_never_reads_loses_its_connection(run: Run, monkeypatch):
    monkeypatch.setattr(connections, "SPARE_SECONDS", 0)
    limits = {"request_seconds": 1, "read_seconds": 1}
    with serving(run, **limits) as url, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        deaf.settimeout(600)
        with suppress(OSError):
            while True:
                deaf.sendall((GET + b"\r\n") * 1000)


def test_too_many_connections_are_refused_until_some_end(run: Run, monkeypatch):
    monkeypatch.setattr(server, "SPARE_CONNECTIONS", 0)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(run, max_rows=1, max_waiting=1) as url:
        with connection(url, request) as first, connection(url, request) as second:
            assert read_head(first).startswith("HTTP/1.1 200 ")
            assert read_head(second).startswith("HTTP/1.1 200 ")
            with connection(url, b"") as third:  # refused before it sends anything
                assert b"HTTP/1.1 503 " in read_all(third)
            assert HTTP.get(f"{url}/health").status_code == 503  # one that sends is told so, too
        for _ in range(600):  # until the server has seen them end
            with connection(url, GET + b"\r\n") as fourth:
                if read_head(fourth).startswith("HTTP/1.1 200 "):
                    return
            time.sleep(0.01)
        pytest.fail("still refused")


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors there")
def test_silent_connections_do_not_use_up_the_descriptors(trained: Path, default_signals):
    words = f"{sys.executable} -m gptmini serve {trained} --port 0"
    with command(trained, words=["sh", "-c", f"ulimit -n 250; exec {words}"]) as (process, url):
        with ExitStack() as held:
            silent = [held.enter_context(connection(url, b"")) for _ in range(300)]
            refused = [read_all(each) for each in silent[-50:]]  # ends at once
            assert all(b"HTTP/1.1 503 " in each for each in refused)
        retried = httpx.HTTPTransport(retries=8)
        with httpx.Client(transport=retried, timeout=600) as client:
            while client.get(f"{url}/health").status_code == 503:  # until it has seen them end
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert "Too many open files" not in process.stderr.read()


def test_more_descriptors_are_allowed_where_more_connections_need_them():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert server._allow_connections(544) == 544
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (544 + 128 + 64, hard)
        assert server._allow_connections(100) == 100  # there is room already
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (544 + 128 + 64, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_routes_and_methods(url: str, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="a base model has no chat format"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}])
    answer = HTTP.get(f"{url}/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "method: not for this address; use POST"
    answer = HTTP.get(f"{url}/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("no such address; the API is at /v1")
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="model: 'gpt-4' is not served"):
        client.models.retrieve("gpt-4")
    assert HTTP.get(f"{url}/health").json() == {"status": "ok"}


def test_other_encodings_of_a_body_are_refused(url: str):
    coded = HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    with connection(url, coded) as sender:
        assert read_head(sender).startswith("HTTP/1.1 501 ")


def test_a_second_host_is_refused(url: str):
    with connection(url, GET + b"Host: evil.example\r\n\r\n") as sender:
        assert read_head(sender).startswith("HTTP/1.1 400 ")


def test_prompts_that_take_long_leave_the_server_to_others(run: Run, monkeypatch):
    begun, enough = threading.Semaphore(0), threading.Event()
    prepare = Server._prepare

    def prepare_slowly(self: Server, request: object, body: bytes, kind: object) -> object:
        if b"slow" in body:
            begun.release()
            assert enough.wait(600)
        return prepare(self, request, body, kind)

    monkeypatch.setattr(Server, "_prepare", prepare_slowly)
    ask = lambda prompt: HTTP.post(f"{url}/v1/completions", json={"prompt": prompt})
    with serving(run, max_preparing=2, prepare_seconds=1) as url, ThreadPoolExecutor(4) as pool:
        try:
            slow = [pool.submit(ask, "slow") for _ in range(4)]
            for each in slow:
                assert each.result().status_code == 503
                assert each.result().headers["x-should-retry"] == "false"
            assert begun.acquire()
            assert begun.acquire()
            assert not begun.acquire(blocking=False)  # two at a time, also of those given up
            assert HTTP.get(f"{url}/health").status_code == 200
            assert ask("quick").status_code == 503
        finally:
            enough.set()
        assert 200 in (ask("quick").status_code for _ in range(60))  # once both threads are free


def test_a_thread_that_never_ends_does_not_keep_the_process():
    script = (
        "import asyncio, threading\n"
        "from gptmini.extras.serve.workers import run_in_thread\n"
        "async def main():\n"
        "    async with asyncio.timeout(0):\n"
        "        await run_in_thread(asyncio.Semaphore(1), threading.Event().wait)\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, timeout=600)
    assert b"TimeoutError" in done.stderr


def test_an_instruct_model_answers_messages(tmp_path: Path):
    run = run_of(tmp_path / "run", CHAT_TOKENIZER, context_length=64)
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    prompt = run.render_chat(messages)
    (expected,) = run.start(
        [prompt], special=True, temperature=0, overflow="stop", max_new_tokens=64
    ).finish()
    with serving(run, max_tokens=64) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as ai:
        whole = ai.chat.completions.create(
            model="x", messages=messages, temperature=0, logprobs=True, top_logprobs=2
        )
        chunks = list(
            ai.chat.completions.create(
                model="x",
                messages=messages,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        with pytest.raises(openai.BadRequestError, match="tools: "):
            ai.chat.completions.create(model="x", messages=messages, tools=[])
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert whole.object == "chat.completion"
    assert whole.usage.prompt_tokens == len(expected.prompt_tokens)
    listed = choice.logprobs.content
    assert len(listed) == whole.usage.completion_tokens == len(expected.tokens)
    for each in listed:
        first, second = each.top_logprobs
        assert (first.token, first.logprob) == (each.token, each.logprob)  # as it is greedy
        assert first.logprob >= second.logprob
    assert choice.finish_reason == "length"
    data = b"".join(bytes(each.bytes) for each in listed)
    assert data.decode(errors="replace") == expected.text
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert chunks[-1].usage == whole.usage
    assert chunks[0].object == "chat.completion.chunk"


def test_any_model_name_and_any_content_type_will_do(url: str):
    for model in ("gpt-4", "", None):
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        assert HTTP.post(f"{url}/v1/completions", json=body).json()["model"] == "small"
    form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` says
    answer = HTTP.post(f"{url}/v1/completions", content=b'{"prompt": "x"}', headers=form)
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "OWN"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://behind.a.proxy"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "OWN"}, 200),
        ({}, 200),
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused(url: str, headers, status):
    headers = {name: value.replace("OWN", url) for name, value in headers.items()}
    answer = HTTP.post(f"{url}/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers
    if status == 403:
        assert answer.json()["error"]["message"].startswith(
            "origin: pages of other sites are refused"
        )


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "[::1", "::1", "a b", ""]
)
def test_other_names_of_this_machine_are_refused(url: str, host: str):
    answer = HTTP.get(f"{url}/health", headers={"host": host})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"host: '{host}' is not this server")


def test_an_ipv6_address_works(run: Run):
    try:
        listen("::1", 0).close()
    except MachineError:
        pytest.skip("no IPv6 here")
    with serving(run, host="::1") as url:
        assert url.startswith("http://[::1]:")
        port = url.rpartition(":")[2]
        for host in (f"[::1]:{port}", "[::1]", f"localhost:{port}"):
            headers = {"host": host}
            answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 200


def test_an_empty_host_is_refused(gptmini, trained: Path):
    code, _, err = gptmini("serve", str(trained), "--host", "")
    assert code == 2
    assert err.startswith("gptmini: --host: empty; 127.0.0.1")


def test_a_blank_key_is_refused(gptmini, trained: Path, monkeypatch):
    monkeypatch.setenv("GPTMINI_API_KEY", " \n")
    code, _, err = gptmini("serve", str(trained), "--port", "0")
    assert code == 2
    assert err.startswith("gptmini: GPTMINI_API_KEY: ")


def test_a_server_without_its_scheduler_is_not_healthy(run: Run):
    transport = httpx.ASGITransport(Server(run, Limits()).app)  # which starts nothing

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/health")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()) == (503, {"status": "stopped"})


def test_metrics_count_the_tokens_of_prompts_and_texts(run: Run):
    body = {"prompt": ["the", "fox!"], "n": 2, "max_tokens": 3, "logit_bias": {"256": -100}}
    with serving(run, max_rows=2) as url:
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
        lines = HTTP.get(f"{url}/metrics").text.splitlines()
    assert "gptmini_prompt_tokens_total 7.0" in lines  # each prompt is read once
    assert "gptmini_generated_tokens_total 12.0" in lines


def test_a_run_whose_name_is_not_utf8_is_served(run: Run):
    named = copy.copy(run)
    named.path = Path(os.fsdecode(b"caf\xe9"))
    with serving(named) as url:
        assert HTTP.get(f"{url}/v1/models").json()["data"][0]["id"] == "caf?"


def test_times_add_up_to_that_of_the_request(run: Run):
    body = {"prompt": "the", "max_tokens": 50, "logit_bias": {"256": -100}}
    with serving(run) as url:
        began = time.perf_counter()
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
        seconds = time.perf_counter() - began
        lines = dict(
            line.rsplit(" ", 1)
            for line in HTTP.get(f"{url}/metrics").text.splitlines()
            if line[0] != "#"
        )
    counts = [lines[f"gptmini_time_{name}_seconds_count"] for name in TIMES]
    assert list(map(float, counts)) == [1, 49]
    assert 0 < sum(float(lines[f"gptmini_time_{name}_seconds_sum"]) for name in TIMES) <= seconds


TIMES = ("to_first_token", "between_tokens")


def test_a_key_is_asked_for(run: Run):
    with serving(run, "voilà") as url:
        assert HTTP.get(url).status_code == 200
        for path in ("metrics", "v1/models"):
            assert HTTP.get(f"{url}/{path}").status_code == 401
        wrong = {**JSON, "authorization": "Bearer sesame"}
        answer = HTTP.post(f"{url}/v1/completions", content=b"{}", headers=wrong)
        assert answer.json()["error"]["message"].startswith("api key: missing or wrong")
        for scheme in ("Bearer", "bearer", "BEARER "):
            right = {**JSON, "authorization": f"{scheme} voilà".encode()}
            answer = HTTP.post(f"{url}/v1/completions", content=b"{}", headers=right)
            assert answer.status_code == 200
        basic = {**JSON, "authorization": "Basic voilà".encode()}
        answer = HTTP.post(f"{url}/v1/completions", content=b"{}", headers=basic)
        assert answer.status_code == 401


def test_without_a_compiler_the_texts_are_the_same(trained: Path, monkeypatch):
    monkeypatch.setattr(door, "load_library", lambda *_: None)
    slow = load_run(trained)
    ask = lambda seed: HTTP.post(
        f"{url}/v1/completions", json={"prompt": "the dog" * seed, "max_tokens": 9, "seed": seed}
    )
    with serving(slow, max_rows=3) as url, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    for seed, answer in enumerate(answers):
        expected = alone(slow, "the dog" * seed, max_new_tokens=9, seed=seed)
        assert answer.json()["choices"][0]["text"] == expected


@needs_compiler
def test_a_prefix_is_prefilled_once(run: Run):
    shared = "the quick brown fox " * 15  # 300 tokens: two chunks, and a rest
    with (
        serving(run, max_rows=2) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        for prompt, cached in ((shared, 0), (shared, 256), (shared[:200], 128), ("a" + shared, 0)):
            answer = client.completions.create(model="small", prompt=prompt, seed=4)
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
            assert answer.choices[0].text == alone(run, prompt, max_new_tokens=16, seed=4)


# The model never ends it, as the end-of-text token is 256.
LONG = {"prompt": "x", "max_tokens": 100_000, "stream": True, "logit_bias": {"256": -100}}


def test_a_full_queue_refuses_and_clients_that_leave_make_room(run: Run):
    with serving(run, max_rows=1, max_waiting=2) as url:
        with ThreadPoolExecutor(3) as pool:
            with HTTP.stream("POST", f"{url}/v1/completions", json=LONG) as first:
                lines = first.iter_lines()
                next(lines)
                body = {"prompt": "x", "max_tokens": 2}
                waiting = [
                    pool.submit(HTTP.post, f"{url}/v1/completions", json=body) for _ in range(2)
                ]
                wait_for(url, 'gptmini_texts{state="waiting"} 2.0')
                refused = HTTP.post(f"{url}/v1/completions", json=body)
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
            assert [each.result().status_code for each in waiting] == [200, 200]
        # A client that waits for the whole answer frees its row too when it leaves.
        soon = httpx.Timeout(600, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{url}/v1/completions", json=LONG | {"stream": False}, timeout=soon)
        wait_for(url, 'gptmini_texts{state="running"} 0.0')
        assert 'gptmini_requests_total{status="429"} 1.0' in HTTP.get(f"{url}/metrics").text


HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)


def test_a_request_has_its_time(run: Run, monkeypatch):
    submitted: list[Request] = []
    submit = Scheduler.submit

    def note(scheduler: Scheduler, requests: list[Request]) -> bool:
        submitted.extend(requests)
        return submit(scheduler, requests)

    monkeypatch.setattr(Scheduler, "submit", note)
    with serving(run, max_rows=1, request_seconds=2) as url:
        answer = HTTP.post(f"{url}/v1/completions", json=LONG | {"stream": False})
        assert answer.status_code == 504
        assert answer.json()["error"]["message"].startswith("not done in 2 seconds")
        assert answer.headers["x-should-retry"] == "false"  # it would take as long again
        assert submitted[0].text.finish_reason == "gone"  # it leaves its row to others
        stream = HTTP.post(f"{url}/v1/completions", json=LONG)
        *_, last = filter(None, stream.text.splitlines())  # an event, or all if none came before
        assert "not done in 2 seconds" in last
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 600) as half:
            half.sendall(HALF)
            assert half.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as half:
            half.sendall(HALF)  # and leaves
        wait_for(url, 'gptmini_requests_total{status="499"} 1.0')


def test_a_client_that_never_reads_loses_its_row(run: Run):
    body = json.dumps(LONG | {"logprobs": 20}).encode()  # soon more than fits into buffers
    head = HALF.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % len(body)
    limits = {"max_rows": 1, "read_seconds": 1, "max_values": 1 << 30}
    with serving(run, **limits) as url, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        deaf.sendall(head + body)
        wait_for(url, "gptmini_prompt_tokens_total 1.0")
        wait_for(url, 'gptmini_texts{state="running"} 0.0')
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stop_ends_is_told_so(run: Run, stream: bool, caplog):
    with ThreadPoolExecutor(1) as pool:
        with serving(run, max_rows=1, drain_seconds=1) as url:
            body = LONG | {"stream": stream}
            sent = pool.submit(HTTP.post, f"{url}/v1/completions", json=body)
            wait_for(url, 'gptmini_texts{state="running"} 1.0')
        answer = sent.result()
    if stream:
        *_, last = filter(None, answer.text.splitlines())
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["message"] == "the server is stopping; send the request again"
    assert error["type"] == "server_error"
    assert not [record for record in caplog.records if record.exc_info]


def test_a_failing_engine_fails_its_requests_and_not_the_server(run: Run, monkeypatch, caplog):
    with serving(run, max_rows=2) as url:
        with monkeypatch.context() as broken:
            broken.setattr(NativeEngine, "__call__", lambda *_: 1 / 0)
            broken.setattr(TorchEngine, "__call__", lambda *_: 1 / 0)
            answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
        assert any(record.exc_info for record in caplog.records)  # the answer names the log
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


@contextmanager
def command(
    trained: Path, words: list[str] | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command itself, and the address it prints."""
    words = words or [sys.executable, "-m", "gptmini", "serve", str(trained), "--port", "0"]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        line = process.stderr.readline()
        yield process, line[line.index("http:") :].split(";")[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_finishes_what_runs_and_exits_with_0(trained: Path, run: Run, name, default_signals):
    with command(trained, GPTMINI_API_KEY="k") as (process, url):
        assert HTTP.get(url).status_code == 401
        secret = "the secret prompt"
        body = {"prompt": secret, "max_tokens": 300, "seed": 1, "stream": True}
        head = {"authorization": "Bearer k"}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body, headers=head) as answer:
            lines = answer.iter_lines()
            found = [next(lines)]
            process.send_signal(getattr(signal, name))
            found += list(lines)
        choices = [json.loads(line[6:])["choices"][0] for line in found[:-2] if line]
        text = "".join(choice["text"] for choice in choices)
        assert text == alone(run, secret, max_new_tokens=300, seed=1)
        log = process.stderr.read()
        assert process.wait(600) == 0
        assert '"POST /v1/completions HTTP/1.1" 200' in log
        assert "secret" not in log
        with pytest.raises(httpx.ConnectError):
            HTTP.get(f"{url}/health")


def test_a_port_in_use_is_one_line(gptmini, trained: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = gptmini("serve", str(trained), "--port", port)
    assert (code, err) == (
        5,
        f"gptmini: 127.0.0.1:{port}: address already in use; choose another --port or --host\n",
    )
