"""`gptmini serve`: serve a trained model over HTTP."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from gptmini.cli.options import Device, RunName, WeightsType, option, resolve_run
from gptmini.console import say, warn
from gptmini.doors import load_pages
from gptmini.errors import ConfigError, MachineError, make_missing_package_error

if TYPE_CHECKING:
    from gptmini.extras.serve.limits import Limits
    from gptmini.generate.run import Run


def serve(
    run: RunName = None,
    host: str = option("127.0.0.1", "NAME", "Address to listen on; 0.0.0.0 is every interface."),
    port: int = option(8000, "N", "Port to listen on; 0 picks a free one.", min=0, max=65535),
    max_rows: int = option(32, "N", "Texts generated in parallel; others wait.", min=1, max=1024),
    weights: WeightsType = "bfloat16",
    device: Device = "auto",
) -> None:
    """Serve a trained model over HTTP, with OpenAI's API.

    Open / in a browser to try the model, look into it and chat. If GPTMINI_API_KEY is set, clients
    must send it. SIGTERM finishes the requests under way.
    """
    path = resolve_run(run)
    try:
        from gptmini.extras.serve import server
        from gptmini.extras.serve.limits import Limits
    except ImportError as error:
        package = str(error.name)
        if package.startswith("gptmini."):  # deleted from this copy, which is said as of others
            raise
        raise make_missing_package_error("serve", package, "serve") from None
    from gptmini.generate.run import load_run

    key = _read_key()
    with server.listen(host, port) as listening:
        trained = load_run(path, device, weights, rounds_model=True)
        limits = Limits(max_rows=max_rows, max_waiting=8 * max_rows)
        hosts = server.list_host_names(listening)
        app = server.Server(trained, limits, key, hosts, _build_page(trained, limits))
        name = f"[{host}]" if ":" in host else host  # an IPv6 address stands in brackets
        url = f"http://{name}:{listening.getsockname()[1]}"
        with suppress(OSError):  # a log on a full disk stops no server
            say(f"{path}, step {trained.step}: {url}; the API is {url}/v1; Ctrl-C stops")
            if hosts is None and not key:
                warn(f"anyone who can reach {host} can use this; set GPTMINI_API_KEY")
        server.serve(app, listening)


def _build_page(run: "Run", limits: "Limits") -> bytes | None:
    """Build the page; None where the part that makes pages is not in this copy."""
    try:
        pages = load_pages()
    except MachineError:
        return None
    return pages.build_served_page(run, limits.max_tokens)


def _read_key() -> str:
    """Read the key from the environment, without the line break that a file may have added."""
    value = os.environ.get("GPTMINI_API_KEY", "")
    key = value.strip()
    if value and not key:
        raise ConfigError("GPTMINI_API_KEY: is blank; set a key, or unset it to serve without one")
    if not key.isprintable():
        raise ConfigError("GPTMINI_API_KEY: has a line break or the like inside; set another key")
    return key


COMMANDS = {"serve": serve}
