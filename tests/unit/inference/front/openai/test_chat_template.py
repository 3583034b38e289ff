"""Chat templates: what they may use, and what the sandbox keeps from them."""

import json

import pytest

from inference.front.guard import RejectedError
from inference.front.openai.codec import ChatTemplate, Codec, load_chat_template
from tests.unit.inference.front.openai.fake_backend import Letters

TALK = [{"role": "user", "content": "Hi <b>"}]


def test_a_template_has_the_messages_and_the_special_tokens():
    source = (
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {%- if loop.first and m.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n"
        "{%- endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TALK) == "<s>[user] Hi <b></s>[bot]"
    assert ChatTemplate("{{ messages | tojson }}", {}).render(TALK) == json.dumps(TALK)


def test_json_has_the_options_of_transformers():
    options = "ensure_ascii=true, separators=(',', ':'), sort_keys=true"
    talk = [{"role": "user", "content": "\xe9"}]
    assert ChatTemplate(f"{{{{ messages | tojson({options}) }}}}", {}).render(talk) == (
        '[{"content":"\\u00e9","role":"user"}]'
    )
    assert ChatTemplate("{{ messages[0].content | tojson }}", {}).render(talk) == '"\xe9"'


def test_the_marks_of_training_leave_no_trace():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render(TALK) == "Hi <b>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 1 }}",
        "{{ range(10000000) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_the_request(source):
    with pytest.raises(RejectedError, match="the chat template refuses them"):
        ChatTemplate(source, {}).render(TALK)


def test_what_is_not_a_template_is_refused_by_the_process_that_compiles_it(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    template = load_chat_template(tmp_path)
    with pytest.raises(ValueError, match="is invalid: Expected an expression"):
        Codec(Letters(), template).check_template()


def test_a_template_is_not_compiled_where_it_is_loaded(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ 'ab' * 3 }}")
    codec = Codec(Letters(), template := load_chat_template(tmp_path))
    assert codec.description()["chat_template"] == "{{ 'ab' * 3 }}"
    assert "compiled" not in vars(template)
    codec.check_template()
    assert "compiled" in vars(template)


def test_templates_are_found_where_transformers_keeps_them(tmp_path):
    assert load_chat_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_chat_template(tmp_path) is None
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "a{{eos_token}}"}]
    settings.write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": named}))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert (template.render(TALK), template.end_token) == ("a</s>", "</s>")
    (tmp_path / "chat_template.jinja").write_text("b{{ eos_token }}")
    own = load_chat_template(tmp_path)
    assert own is not None
    assert own.render(TALK) == "b</s>"
    settings.write_text(json.dumps({"chat_template": [{"name": ["rag"]}, 1]}))
    (tmp_path / "chat_template.jinja").unlink()
    assert load_chat_template(tmp_path) is None
    settings.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ValueError, match="type int"):
        load_chat_template(tmp_path)
    for wrong in ("{", "[]", "[" * 100_000):
        settings.write_text(wrong)
        with pytest.raises(ValueError, match=r"config\.json cannot be read"):
            load_chat_template(tmp_path)
    settings.unlink()
    own_file = tmp_path / "own.jinja"
    own_file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"own\.jinja cannot be read"):
        load_chat_template(tmp_path, own=own_file)
