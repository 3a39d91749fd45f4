"""Serve a trained model over HTTP, in the formats of OpenAI's completions and chat completions.

Read `limits` (what one client may have), `scheduler` (one thread that generates the texts of all
callers), `completions` (the JSON of a request to texts, and back) and `chat` (the same for
messages), `connections` (who may hold one and for how long), then `server` (routes, errors,
signals). `page.html` is the page that a browser shows. Of the rest of gptmini, this package needs
only `generate/`.
"""
