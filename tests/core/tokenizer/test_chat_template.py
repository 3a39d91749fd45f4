"""Chat templates: the prompts that transformers makes, and templates that mean harm."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptmini.errors import CheckpointError, ConfigError
from gptmini.tokenizer import chat_template as chat
from gptmini.tokenizer.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# The devices of published templates: default system messages, tests of the order of roles, loops
# that break, namespaces, white space control, JSON, a date that is given, generation blocks.
TEMPLATES = {
    "default system message": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "headers": """{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
    {{- message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
""",
    "alternating": """{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- ' [INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
""",
    "namespaces and json": """
{% set found = namespace(last=-1) %}
{% for message in messages %}
    {% if message.role == 'user' %}
        {% set found.last = loop.index0 %}
    {% endif %}
    {% if loop.index0 > 4 %}
        {% break %}
    {% endif %}
    <{{ message | tojson }}{{ message.items() | list | length }}>
{% endfor %}
{{ found.last }}{{ tools is none }}{{ documents }}{{ pad_token is defined }}
""",
}
WORDS = ["hello", "<b>&amp;</b>", "  ", "\n\n", "你好", "👍🏽", '"quoted"', "{{ x }}", "\\n", "é'"]


def converse(draw: random.Random, alternates: bool) -> list[dict[str, Any]]:
    """A random conversation."""
    messages = []
    for turn in range(draw.randrange(1, 9)):
        role = ("user", "assistant")[turn % 2]
        if not alternates:
            role = draw.choice(["system", "user", "assistant"])
        content = " ".join(draw.choices(WORDS, k=draw.randrange(6)))
        messages.append({"role": role, "content": content})
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    draw = random.Random(name)
    template = ChatTemplate(TEMPLATES[name], TOKENS, Path("run"))
    for number in range(8):
        messages = converse(draw, name == "alternating")
        generates = number % 2 == 0
        (expected,), _ = utils.render_jinja_template(
            [messages], chat_template=TEMPLATES[name], add_generation_prompt=generates, **TOKENS
        )
        assert template.render(messages, generates) == expected


def test_what_a_template_says_of_a_conversation_is_reported():
    template = ChatTemplate(TEMPLATES["alternating"], TOKENS, Path("run"))
    message = {"role": "user", "content": "a"}
    with pytest.raises(ConfigError, match=r"^messages: roles must alternate: user"):
        template.render([message, message])
    assert template.render([message]) == "<s> [INST] a [/INST]"


HOSTILE = {
    "output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "one long text": "{{ 'x' * 10000001 }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "object": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "code": "{{ messages.__class__.__base__.__subclasses__()[0]('x').system('touch /tmp/x') }}",
    "file": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}",
    "import": "{% import 'os' as os %}",
    "change": "{{ messages.append(1) }}",
    "missing": "{{ nothing.at.all }}",
    "kept": "{% set x %}{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
    "constant": "{% set x %}{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_one_line(name):
    template = ChatTemplate(HOSTILE[name], {}, Path("run"))
    with pytest.raises(CheckpointError, match=r"^run: its chat template fails") as error:
        template.render([{"role": "user", "content": "a"}])
    (line,) = error.value.lines
    assert len(line) < 400


def test_a_long_text_is_refused_before_it_is_whole(monkeypatch):
    monkeypatch.setattr(chat, "MAX_LENGTH", 5)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, Path("run"))
    few = [{"content": "ab"}, {"content": "cde"}]
    assert template.render(few) == "abcde"
    with pytest.raises(CheckpointError, match="over 5 characters"):
        template.render([*few, {"content": "f"}, {"content": object.__doc__}])


LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "loops": LOOP * 3 + "{% endfor %}" * 3,
    "macros": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_has_its_time(monkeypatch, name):
    seconds = itertools.count()  # a clock on which every look takes a second
    monkeypatch.setattr(chat, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    template = ChatTemplate(ENDLESS[name], {}, Path("run"))
    with pytest.raises(CheckpointError, match="it takes over 5 seconds"):
        template.render([{"role": "user", "content": "a"}])


def test_a_template_sees_plain_data_only():
    class Text(str):
        def shout(self) -> str:
            raise AssertionError

    template = ChatTemplate("{{ messages[0].content.shout is defined }}", {}, Path("run"))
    assert template.render([{"role": "user", "content": Text("a")}]) == "False"
