"""A trained model over HTTP, in the format of OpenAI's completions.

Read `completions` (the JSON of a request to texts, and back), then `server` (routes, limits,
signals); `page.html` is what a browser shows. The texts are drawn by `serve/scheduler.py`; the room
knows nothing but `generate/`.
"""
