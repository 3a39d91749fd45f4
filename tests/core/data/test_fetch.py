import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gptmini.data import fetch
from gptmini.data.fetch import KNOWN_CORPORA, KnownCorpus
from gptmini.errors import DataError, MachineError

TEXT = b"to be or not to be\n" * 999


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """A server on this machine with a good text and another one."""
    answers = {"/good": TEXT, "/other": TEXT.upper()}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answers.get(self.path)
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    for name in ("good", "other", "none"):
        url = f"http://127.0.0.1:{http.server_port}/{name}"
        monkeypatch.setitem(
            KNOWN_CORPORA, name, KnownCorpus(url, len(TEXT), hashlib.sha256(TEXT).hexdigest())
        )
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_known_text_is_fetched_once(server: HTTPServer, tmp_path: Path):
    path = fetch.fetch("good", tmp_path / "data")
    assert path.read_bytes() == TEXT
    made = path.stat().st_mtime_ns
    server.shutdown()
    assert fetch.fetch("good", tmp_path / "data") == path
    assert path.stat().st_mtime_ns == made
    path.write_text("mine")
    with pytest.raises(
        DataError, match=r"good.txt: already exists with other content; move it away"
    ):
        fetch.fetch("good", tmp_path / "data")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["other", "none"])
def test_an_unexpected_answer_leaves_nothing(server: HTTPServer, tmp_path: Path, name):
    with pytest.raises((DataError, MachineError), match=f"http.*/{name}: "):
        fetch.fetch(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_network_alternatives_are_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(KNOWN_CORPORA, "far", KnownCorpus("http://127.0.0.1:1/x", 1, "0"))
    with pytest.raises(MachineError, match=r"download failed .* builtin:python-docs"):
        fetch.fetch("far", tmp_path)
    with pytest.raises(DataError, match="choose tinyshakespeare or tinystories"):
        fetch.fetch("x", tmp_path)
