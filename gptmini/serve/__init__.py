"""A trained model behind HTTP, in OpenAI's completions interface.

Read `batch` (texts of all requests in one engine), `completions` (a request's JSON to texts and
back), `server` (routes, limits, signals); `page.html` is what a browser shows. The room stands on
`generate/` alone.
"""
