"""Spans of a chat's parts, under templates that put them in different places."""

import pytest

from learnkv.prompts.chat import chat_spans
from tests.recording import byte_tokenizer

CHATML = (
    "{% if messages[0].role != 'system' %}<|system|>Be kind.<|end|>{% endif %}"
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FOLDED = (  # the system prompt inside the first user turn, as Llama 2 has it
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = '<<' ~ m.content ~ '>>' %}"
    "{% elif m.role == 'user' %}[INST]{{ ns.system if loop.index0 < 2 else '' }}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": "  Where is the cat? "},
    {"role": "assistant", "content": "Ici."},
    {"role": "user", "content": "And the cat?"},
]
LAST = (  # the system prompt inside the last user turn
    "{% for m in messages %}{% if m.role != 'system' %}[{% if loop.last %}{{ messages[0].content }} / {% endif %}"
    "{{ m.content }}]{% endif %}{% endfor %}"
)
AGAIN = "{% for m in messages %}<{{ m.content }}>{% endfor %}again: {{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "cat_of", "parameters": {}}}]


def with_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def text(tokenizer, spans, span):
    return tokenizer.decode(spans.ids[slice(*span)])


@pytest.mark.parametrize("template", [CHATML, FOLDED], ids=["chatml", "folded"])
def test_each_message_is_found_whatever_the_template_makes_of_it(template):
    tokenizer = with_template(template)
    spans = chat_spans(tokenizer, CHAT)
    found = [text(tokenizer, spans, span).strip() for span in spans.messages]
    assert found == [message["content"].strip() for message in CHAT]
    assert spans.first_user == spans.messages[1] and spans.tools is None
    assert "Answer in French." in text(tokenizer, spans, spans.system) and spans.system[1] <= spans.first_user[0]
    assert spans.ids == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_printed_spans_leave_the_token_ids_out():
    spans = chat_spans(with_template(CHATML), CHAT)
    assert "ids" not in repr(spans) and f"first_user={spans.first_user}" in repr(spans)


def test_a_system_prompt_that_the_template_brings_itself_is_part_of_the_system_span():
    tokenizer = with_template(CHATML)
    spans = chat_spans(tokenizer, CHAT[1:2])
    assert text(tokenizer, spans, spans.system) == "<|system|>Be kind.<|end|><|user|>"


def test_the_tool_schema_is_what_the_template_makes_of_the_tools():
    tokenizer = with_template(CHATML)
    spans = chat_spans(tokenizer, CHAT, tools=TOOLS)
    assert "cat_of" in text(tokenizer, spans, spans.tools)
    assert spans.system[0] <= spans.tools[0] and spans.tools[1] <= spans.system[1]


def test_a_chat_without_a_user_or_with_an_empty_message_has_no_such_span():
    spans = chat_spans(with_template(CHATML), [{"role": "system", "content": ""}])
    assert spans.first_user is None and spans.system is None and spans.messages == (None,)


def test_a_system_prompt_put_into_the_last_turn_is_found_there():
    tokenizer = with_template(LAST)
    spans = chat_spans(tokenizer, CHAT)
    assert text(tokenizer, spans, spans.system) == text(tokenizer, spans, spans.messages[0]) == "Answer in French."


@pytest.mark.parametrize("rest", [[], [{"role": "user", "content": " "}]], ids=["no user", "an empty one"])
def test_a_system_prompt_is_found_without_a_users_text(rest):
    tokenizer = with_template(CHATML)
    spans = chat_spans(tokenizer, [CHAT[0], *rest, {"role": "assistant", "content": "Oui."}])
    assert text(tokenizer, spans, spans.system) == "<|system|>Answer in French."


def test_of_a_message_that_is_said_again_the_first_place_counts():
    tokenizer = with_template(AGAIN)
    spans = chat_spans(tokenizer, CHAT)
    assert text(tokenizer, spans, spans.messages[0]) == "Answer in French." and spans.messages[0][0] == 1


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (None, CHAT, "no chat template"),
        (CHATML, [], "without messages"),
        (CHATML, [{"content": "hello"}], "message 0 has no role"),
        (CHATML, [{"role": "user", "content": "a\ud800b"}], "message 0"),
        ("{{ raise_exception('never') }}", CHAT, "refuses this chat"),
        (CHATML, [{"role": "user", "content": [{"type": "image"}]}], r"message 0 \(user\) has content of type list"),
    ],
)
def test_what_has_no_spans_is_refused(template, messages, says):
    with pytest.raises(ValueError, match=says):
        chat_spans(with_template(template), messages)
