"""A run as one HTML file in which its model runs: to try, to look inside, to mail to a friend.

For learners, and for those who want to show a model to somebody without Python. Without this folder
a run is tried in the terminal or through the server, and nobody can switch off a head by a click.

Read model.js first: it is model/ and generate/ once more, in plain JavaScript. page.js has what the
reader chose and the first screen, sections.js and views.js show the rest, learn.js takes steps of
learning, draw.js draws, words.js has all sentences in English and Chinese. export.py puts them into
one file. In the page of `gptmini serve`, ask.js has the chat, and the text of a model that is too
large to travel.
"""
