"""Chat templates: the prompts that transformers makes, and templates that mean harm."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptmini.errors import CheckpointError, ConfigError
from gptmini.tokenizer import chat_template as chat
from gptmini.tokenizer.chat_template import RENDERER, ChatTemplate

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
    for number in range(25):
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
    "memory": (
        "{% set x = namespace(v='a') %}"
        "{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}"
    ),
    "product": "{{ 'a' * 10 ** 12 }}",
    "output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "object": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "code": "{{ messages.__class__.__base__.__subclasses__()[0]('x').system('touch /tmp/x') }}",
    "file": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}",
    "import": "{% import 'os' as os %}",
    "change": "{{ messages.append(1) }}",
    "missing": "{{ nothing.at.all }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_one_line(name, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 5)
    template = ChatTemplate(HOSTILE[name], {}, Path("run"))
    with pytest.raises(CheckpointError, match=r"^run: its chat template (fails|uses)") as error:
        template.render([{"role": "user", "content": "a"}])
    (line,) = error.value.lines
    assert len(line) < 400


def test_a_template_that_never_ends_is_ended(monkeypatch):
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{% if messages|length > 1 %}" + loop + "{% endif %}ok", {}, Path("run")
    )
    message = {"role": "user", "content": "a"}
    monkeypatch.setattr(chat, "MAX_SECONDS", 30)
    assert template.render([message]) == "ok"
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    with pytest.raises(CheckpointError, match="uses too much time or memory; write the prompt"):
        template.render([message, message])
    monkeypatch.setattr(chat, "MAX_SECONDS", 30)
    assert template.render([message]) == "ok"  # by another process


def test_ctrl_c_leaves_the_renderer_alone_and_no_answer_behind(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", {}, Path("run"))
    assert template.render([{"content": "a"}]) == "a"
    process = template._process
    assert process is not None
    if hasattr(os, "getpgid"):  # Ctrl-C signals the group of the terminal's foreground
        assert os.getpgid(process.pid) != os.getpgid(0)

    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.stdout, "readline", interrupt)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"content": "b"}])
    assert process.poll() is not None
    assert template.render([{"content": "c"}]) == "c"  # by another process


def test_a_renderer_that_ended_is_started_again():
    template = ChatTemplate("ok", {}, Path("run"))
    assert template.render([]) == "ok"
    process = template._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.render([]) == "ok"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_a_renderer_that_nobody_ends_does_so_itself():
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    code = f"import sys; sys.path.append({str(RENDERER.parent)!r}); import template_renderer as r; "
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code + "r.MAX_CPU_SECONDS = 0.5; r.main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    request = json.dumps({"template": loop, "variables": [{}]}) + "\n"
    process.communicate(request.encode(), timeout=60)
    assert process.returncode == -signal.SIGPROF


def test_each_text_has_its_own_time_and_a_template_is_compiled_once():
    code = f"import sys; sys.path.append({str(RENDERER.parent)!r}); import template_renderer as r; "
    code += """
limits = []
r.limit_time = limits.append
compiled = []
renderer = r.Renderer()
compile = renderer._environment.from_string
renderer._environment.from_string = lambda source: compiled.append(source) or compile(source)
for source in ("{{ x }}", "{{ x }}", "{{ y }}", "{% for %}"):
    answer = renderer.answer({"template": source, "variables": [{"x": 1}, {"x": 2}]})
    print(answer.get("texts"), limits, len(compiled))
    limits.clear()
"""
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "['1', '2'] [1, 1, 0] 1",
        "['1', '2'] [1, 1, 0] 1",
        "['', ''] [1, 1, 0] 2",
        "None [1, 0] 3",
    ]


def test_the_renderer_ends_with_its_template():
    template = ChatTemplate("a", {}, Path("run"))
    assert template.render([]) == "a"
    process = template._process
    assert isinstance(process, subprocess.Popen)
    del template
    gc.collect()
    assert process.poll() is not None
