"""The page that the server gives: the one of `export`, a chat, and the text of a large model."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptmini.extras.page import export
from gptmini.extras.page.export import build_served_page
from gptmini.extras.serve.command import _build_page
from gptmini.extras.serve.limits import Limits
from gptmini.generate.run import Run, load_run
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from tests.extras.serve.serving import alone, serving
from tests.samples import CHAT_TOKENIZER, TOKENIZER, run_of
from tests.support import HOSTILE, bpe_file

TIMEOUT = 600  # seconds, for a busy machine is not a failure
HTTP = httpx.Client(timeout=TIMEOUT)
PROMPT = "the quick brown"


@pytest.fixture(scope="session", autouse=True)
def closed() -> Iterator[None]:
    """Close the client at the very end; a worker may leave this file and come back."""
    with HTTP:
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("page")
    run_of(folder / "small", TOKENIZER, context_length=64)
    return load_run(folder / "small", "cpu")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a chat template."""
    folder = tmp_path_factory.mktemp("page")
    return run_of(folder / "chat", CHAT_TOKENIZER, context_length=160)


@pytest.fixture
def too_large(monkeypatch) -> None:
    """No model is small enough for a page."""
    monkeypatch.setattr(export, "MAX_PAGE_BYTES", 1000)


def page_of(run: Run) -> bytes:
    return build_served_page(run, 1000)


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a served page; fails if anything is `wrong`, or asks others than the server."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.set_default_timeout(1000 * TIMEOUT)
    asked: list[str] = []

    def note(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    def visit(url: str) -> Any:
        tab = context.new_page()
        tab.on("console", note)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append("dialog"))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(url)
        return tab

    visit.wrong = wrong
    visit.asked = asked
    yield visit
    context.close()
    assert wrong == []


def wait_until(tab: Any, condition: str) -> None:
    tab.wait_for_function(f"() => {condition}")


def data_of(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(data)


def without_server(page: bytes) -> str:
    """A page without what it says of a server, and without the nonce that depends on all of it."""
    text = re.sub(r'"server": (null|\{[^}]*\})', "", page.decode())
    text = re.sub(r"connect-src '\w+'", "", text)
    return re.sub(r'nonce-[^\']*\'|nonce="[^"]*"', "", text)


# -- what the server sends -------------------------------------------------------------------------


def test_without_a_page_the_root_names_the_api(run: Run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gptmini.extras.page.export", None)
    monkeypatch.delattr("gptmini.extras.page.export")
    assert _build_page(run, Limits()) is None
    with serving(run) as url:
        assert "/v1" in HTTP.get(url).text


def test_the_page_of_a_small_model_is_that_of_export(run: Run, tmp_path: Path):
    export.export_page(load_run(run.path, "cpu", "float32"), tmp_path / "page.html")
    page = _build_page(run, Limits())
    with serving(run, page=page) as url:
        answer = HTTP.get(url)
        again = HTTP.get(url, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    exported = (tmp_path / "page.html").read_bytes()
    assert without_server(answer.content) == without_server(exported)
    assert data_of(answer.text)["server"] is not None
    assert data_of(exported.decode())["server"] is None
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "connect-src 'self'" in answer.text
    assert "connect-src 'none'" in exported.decode()


def test_a_run_of_int8_stays_in_it(run: Run):
    page = page_of(load_run(run.path, "cpu", "int8"))
    assert data_of(page.decode())["precision"] == "int8"


def test_with_a_key_the_page_needs_it_as_a_password(run: Run):
    with serving(run, "s\u00e9same", page=page_of(run)) as url:
        refused = HTTP.get(url)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for name, password in (("", "sesame"), ("s\u00e9same", "")):
            assert HTTP.get(url, auth=(name, password)).status_code == 401
        for scheme in ("Basic", "Basic %", "Basic c8Opc2FtZQ"):
            assert HTTP.get(url, headers={"authorization": scheme}).status_code == 401
        right = httpx.BasicAuth("any", "s\u00e9same")
        assert b'id="weights"' in HTTP.get(url, auth=right).content
        assert HTTP.get(f"{url}/v1/models", auth=right).status_code == 200
        other = {"sec-fetch-site": "cross-site"}  # a browser sends a password on its own
        assert HTTP.get(f"{url}/v1/models", auth=right, headers=other).status_code == 403


# -- in a browser ----------------------------------------------------------------------------------


def test_a_small_model_runs_in_the_page(run: Run, visit):
    with serving(run, page=page_of(run)) as url:
        tab = visit(url)
        assert tab.locator("#top .chip").count() > 10
        tab.locator("#text").fill(PROMPT)
        tab.get_by_role("button", name="One token").click()
        assert tab.evaluate("continuation.tokens.length") == 1
        assert tab.locator("#chat").count() == 0  # it has no template
        assert visit.asked == [f"{url}/"]


def answer(run: Run, messages: list[dict[str, str]]) -> str:
    return alone(run, run.encode_chat(messages), temperature=0, overflow="stop", max_new_tokens=20)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_conversation_is_streamed(talking: Run, visit):
    with serving(talking, page=page_of(talking), max_tokens=20) as url:
        tab = visit(url)
        assert tab.locator("main > section").first.get_attribute("id") == "chat"
        tab.evaluate(
            """() => {
              state.sample.temperature = 0;
              globalThis.seen = [];
              const show = showChatState;
              showChatState = () => { show(); seen.push(chat.messages.at(-1)?.content); };
            }"""
        )
        box = tab.locator("#message")
        box.press_sequentially("Hi")
        box.press("Shift+Enter")
        box.press_sequentially("you")
        box.press("Enter")
        wait_until(tab, "chat.running === null && chat.messages.length === 2")
        messages = [turn("user", "Hi\nyou")]
        messages.append(turn("assistant", answer(talking, messages)))
        assert tab.evaluate("chat.messages") == messages
        grown = tab.evaluate("seen.map((text) => text.length)")
        assert grown == sorted(grown)
        assert len(set(grown)) > 3
        assert box.input_value() == ""
        box.fill("a")
        tab.get_by_role("button", name="Send").click()
        wait_until(tab, "chat.running === null && chat.messages.length === 4")
        messages.append(turn("user", "a"))
        messages.append(turn("assistant", answer(talking, messages)))
        assert tab.evaluate("chat.messages") == messages
        shown = tab.locator(".message > div").all_inner_texts()
        assert [text.split() for text in shown] == [each["content"].split() for each in messages]
        tab.get_by_role("button", name="New conversation").click()
        assert tab.locator(".message").count() == 0
        assert visit.asked == [f"{url}/"] + [f"{url}/v1/chat/completions"] * 2


def test_what_a_chat_cannot_do_is_said_in_words(talking: Run, visit):
    with serving(talking, page=page_of(talking)) as url:
        tab = visit(url)
        box, problem = tab.locator("#message"), tab.locator("#chat .problem")
        tab.route("**/v1/chat/completions", lambda route: None)  # and never answers
        box.fill("one")
        box.press("Enter")
        wait_until(tab, "chat.running !== null")
        tab.get_by_role("button", name="Stop").click()
        wait_until(tab, "chat.running === null")
        assert tab.locator(".message").count() == 0
        assert box.input_value() == "one"  # to send it again
        assert problem.inner_text() == ""
        box.press("Enter")
        tab.get_by_role("button", name="New conversation").click()
        wait_until(tab, "chat.running === null && chat.messages.length === 0")
        assert box.input_value() == ""  # what was stopped does not come back
        tab.unroute("**/v1/chat/completions")
        box.fill("one")
        tab.evaluate("state.sample.temperature = -1")
        box.press("Enter")
        wait_until(tab, "chat.problem !== ''")
        assert problem.inner_text().startswith("temperature")
        box.fill("word " * 99)
        tab.evaluate("state.sample.temperature = 1")
        box.press("Enter")
        wait_until(tab, "chat.running === null && chat.problem.startsWith('messages')")
    box.press("Enter")  # the server is gone
    wait_until(tab, "chat.running === null && chat.problem.includes('running?')")
    assert problem.is_visible()
    assert all("Failed to load resource" in each for each in visit.wrong)
    visit.wrong.clear()


def test_an_input_method_keeps_its_enter(talking: Run, visit):
    with serving(talking, page=page_of(talking)) as url:
        tab = visit(url)
        tab.locator("#message").fill("ni")
        event = "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true })"
        tab.evaluate(f"chatBox.dispatchEvent({event})")
        assert tab.evaluate("[chat.running, chatBox.value]") == [None, "ni"]


def test_the_server_continues_the_text_of_a_large_model(run: Run, too_large, visit):
    with serving(run, page=page_of(run)) as url:
        tab = visit(url)
        assert visit.asked == [f"{url}/"]
        assert tab.locator(".chip, .bars span.bar").count() == 0  # looking inside is not for it
        tab.locator("#text").fill(PROMPT)
        tab.locator("#settings summary").click()
        tab.locator("#seed").fill("5")
        tab.evaluate("data.sample.max_new_tokens = 12")
        generate = tab.get_by_role("button", name="Generate")
        generate.click()
        wait_until(tab, f"remote.running === null && remote.text !== {json.dumps(PROMPT)}")
        text = PROMPT + alone(run, PROMPT, seed=5, max_new_tokens=12)
        assert tab.locator("#text").input_value() == text
        generate.click()  # goes on from there
        wait_until(tab, f"remote.running === null && remote.text !== {json.dumps(text)}")
        assert tab.locator("#text").input_value() == text + alone(
            run, text, seed=5, max_new_tokens=12
        )
        tab.route("**/v1/completions", lambda route: None)  # and never answers
        generate.click()
        tab.locator("#text").fill("another text")  # stops it
        wait_until(tab, "remote.running === null")
        tab.unroute("**/v1/completions")
        assert tab.locator("#top .problem").inner_text() == ""
        tab.locator("#seed").fill("6")
        generate.click()
        wait_until(tab, "remote.running === null && remote.text.startsWith('another text')")
    generate.click()  # the server is gone
    wait_until(tab, "remote.running === null && remote.problem.includes('running?')")
    assert all("Failed to load resource" in each for each in visit.wrong)
    visit.wrong.clear()


def test_a_tokenizer_that_the_page_cannot_run_stays_with_the_server(run: Run, visit):
    tokenizer = BpeTokenizer.from_dict(json.loads(bpe_file(kind="strange")))
    run = Run(run.path, run.config, tokenizer, run.model, run.state)
    with serving(run, page=page_of(run)) as url:
        tab = visit(url)
        tab.locator("#text").fill(PROMPT)
        tab.get_by_role("button", name="Generate").click()
        wait_until(tab, f"remote.running === null && remote.text.length > {len(PROMPT)}")


def test_a_browser_asks_for_the_key_and_then_all_is_there(talking: Run, browser: Any):
    with serving(talking, "sesame", page=page_of(talking)) as url:
        context = browser.new_context(http_credentials={"username": "", "password": "sesame"})
        context.set_default_timeout(1000 * TIMEOUT)
        tab = context.new_page()
        tab.goto(url)
        assert tab.locator("#top .chip").count() > 5
        tab.locator("#message").fill("Hi")
        tab.locator("#message").press("Enter")
        wait_until(tab, "chat.running === null && chat.messages.length === 2")
        context.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_hostile_names_and_messages_run_nothing(talking: Run, visit, monkeypatch, is_large: bool):
    if is_large:
        monkeypatch.setattr(export, "MAX_PAGE_BYTES", 1000)
    name = re.sub("[/\0\ud800]", "_", HOSTILE)  # the rest may be in the name of a folder
    run = Run(Path("runs") / name, talking.config, talking.tokenizer, talking.model, talking.state)
    evil = "<script>alert(2)</script><img src=x onerror=alert(3)>"
    with serving(run, page=page_of(run)) as url:
        tab = visit(url)
        scripts = tab.evaluate("document.scripts.length")
        body = json.dumps({"choices": [{"delta": {"content": evil}, "finish_reason": "stop"}]})
        tab.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=f"data: {body}\n\ndata: [DONE]\n\n"),
        )
        tab.locator("#message").fill(HOSTILE)
        tab.locator("#message").press("Enter")
        wait_until(tab, "chat.running === null && chat.messages.length === 2")
        tab.locator("#text").fill(evil)
        if is_large:
            tab.get_by_role("button", name="Generate").click()
            wait_until(tab, f"remote.text.length > {len(evil)} && remote.running === null")
        assert tab.locator(".message > div").all_inner_texts()[1] == evil
        assert tab.evaluate("document.querySelectorAll('img, iframe, object').length") == 0
        assert tab.evaluate("document.scripts.length") == scripts
        assert "<img src=x onerror=alert(1)>" in tab.locator("h1").inner_text()


@pytest.mark.parametrize("is_large", [False, True])
def test_it_fits_a_phone_and_speaks_chinese(talking: Run, visit, monkeypatch, is_large: bool):
    if is_large:
        monkeypatch.setattr(export, "MAX_PAGE_BYTES", 1000)
    with serving(talking, page=page_of(talking)) as url:
        tab = visit(url)
        tab.locator("#message").fill("x" * 300)
        tab.locator("#message").press("Enter")  # too long, which it says
        wait_until(tab, "chat.running === null && chat.problem !== ''")
        tab.evaluate("chat.messages.push({ role: 'assistant', content: 'x'.repeat(300) })")
        tab.get_by_role("button", name="中文").click()
        for width in (390, 1280):
            tab.set_viewport_size({"width": width, "height": 844})
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            over = """parts => parts.filter((part) => part.scrollWidth > part.clientWidth + 1)"""
            assert tab.eval_on_selector_all(".card, .message > div, .row, .chip", over) == []
        tab.evaluate("startChat()")
        words = re.findall(r"[A-Za-z]{4,}", tab.locator("#chat").inner_text())
        assert set(words) <= {"Enter", "Shift"}
    visit.wrong.clear()  # what the browser says of status 400
