"""Text in, checked token files out.

Read `formats` and `sources` (files to documents), `bpe` and `tokenizer` (documents to tokens),
`tokens` (token files, the corpus), `parts` (token files made by many machines), then `corpus`,
which prepares all this in a cache. For exports there is `tokenizer_json`. Knows no torch and no
model.
"""
