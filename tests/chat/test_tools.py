"""Tools: schemas, every way a call can be written or broken, and a loop that nothing stops."""

import json
from typing import Any, Literal

import pytest

from interlens.chat.tools import Tool, ToolCall, described_by_template, description, format_of, parse, perform
from tests.chat.templates import TEMPLATES


def weather(city: str, days: int = 3, *, metric: bool = True) -> str:
    """Say how the weather will be.

    A second paragraph.
    """
    return f"{city} {days} {metric}"


def test_a_signature_is_the_schema():
    assert Tool.of(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say how the weather will be.\n\nA second paragraph.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    }
    assert Tool.of(Tool.of(weather)) == Tool.of(weather)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (float, {"type": "number"}),
        (dict, {"type": "object"}),
        (list, {"type": "array"}),
        (dict[str, int], {"type": "object"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list[list[str]], {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        (int | None, {"type": "integer"}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (object, {"type": "string"}),
    ],
)
def test_types_are_told_in_json(hint, schema):
    def tool(x):
        return x

    tool.__annotations__ = {"x": hint}
    assert Tool.of(tool).schema["function"]["parameters"]["properties"]["x"] == schema


def test_a_type_that_cannot_be_found_is_a_string():
    def tool(x: "Missing"):  # noqa: F821
        return x

    assert Tool.of(tool).schema["function"]["parameters"]["properties"]["x"] == {"type": "string"}


def anything(*args):
    return args


def options(**options):
    return options


def by_place(a, /):
    return a


@pytest.mark.parametrize("fn", [anything, options, by_place, lambda x: x, 3, None])
def test_what_cannot_be_called_by_names_is_no_tool(fn):
    with pytest.raises(TypeError, match="a tool is"):
        Tool.of(fn)


@pytest.mark.parametrize(
    ("name", "form", "described"),
    [
        ("qwen2.5", "json", True),
        ("llama3.1", "llama", True),
        ("gemma2", "gemma", False),
        ("chatml", "json", False),
        ("mistral", "json", False),
    ],
)
def test_the_template_decides_the_format(name, form, described):
    source = TEMPLATES[name]
    assert format_of(source) == form
    assert described_by_template(source) == described
    assert format_of(None) == "json"


@pytest.mark.parametrize("form", ["json", "llama", "gemma"])
def test_a_description_lists_the_tools_and_the_form(form):
    text = description([Tool.of(weather)], form)
    assert json.dumps(Tool.of(weather).schema["function"]) in text
    assert {"json": "<tool_call>", "llama": '"parameters"', "gemma": "tool_code"}[form] in text


CALL = ToolCall("weather", {"city": "Rome", "days": 2})
JSON = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("json", f"<tool_call>{JSON}</tool_call>", [CALL]),
        (
            "json",
            f"I look.\n<tool_call>\n{JSON}\n</tool_call>\nand\n<tool_call>{JSON}</tool_call>",
            [CALL, CALL],
        ),
        ("json", f"<tool_call>{JSON}", [CALL]),
        ("json", "<tool_call>" + JSON.replace("arguments", "parameters") + "</tool_call>", [CALL]),
        (
            "json",
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
            [ToolCall("f", {"x": 1})],
        ),
        ("json", '<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", {})]),
        ("json", "It rains.", []),
        ("json", JSON, []),
        ("llama", JSON.replace("arguments", "parameters"), [CALL]),
        ("llama", "<|python_tag|>" + JSON, [CALL]),
        ("llama", "It rains.", []),
        ("gemma", "```tool_code\nweather(city='Rome', days=2)\n```", [CALL]),
        ("gemma", "```tool_code\nprint(weather(city='Rome', days=2))\n```", [CALL]),
        ("gemma", "```tool_code\nweather(city='Rome', days=2)", [CALL]),
        ("gemma", "```python\nweather(city='Rome')\n```", []),
        ("gemma", "It rains.", []),
    ],
)
def test_calls_are_read(form, text, calls):
    assert parse(text, form) == calls


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "[]", "7", "null", '"x"', '{"name": "f", "arguments": {"x": ', "{'name': 'f'}"),
        *('{"arguments": {}}', '{"name": null}', '{"name": 3}', '{"name": "f", "arguments": 7}'),
        *('{"name": "f", "arguments": null}', '{"name": "f", "arguments": [["a", 1]]}'),
        *('{"name": "f", "arguments": "x"}', "[" * 100_000, '{"name": "f", "arguments": ' + "[" * 100_000),
    ],
)
def test_broken_json_calls_say_why(body):
    (call,) = parse(f"<tool_call>{body}</tool_call>", "json")
    assert call.name == ""
    assert call.error
    assert perform(call, [Tool.of(weather)]).startswith("error: the call could not be read as JSON")


@pytest.mark.parametrize(
    "body",
    [
        *(
            "",
            "x = 1",
            "1 + 1",
            "weather('Rome')",
            "weather(**{'city': 'Rome'})",
            "weather(city=Rome)",
            "a(); b()",
        ),
        *("weather(city={[]: 1})", "weather(city=", "\0", "-" * 100_000 + "1", "(" * 5_000, "f(x=open('y'))"),
    ],
)
def test_broken_python_calls_say_why_and_run_nothing(body):
    (call,) = parse(f"```tool_code\n{body}\n```", "gemma")
    assert call.name == ""
    assert perform(call, [Tool.of(weather)]).startswith(
        "error: the call could not be read as one Python call"
    )


class Unprintable:
    def __str__(self):
        raise OSError("no words")


def make(result: Any) -> Tool:
    """A tool that returns, or raises, what it is given."""

    def tool() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    return Tool.of(tool)


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ({"é": [1, None]}, '{"é": [1, null]}'),
        (3.5, "3.5"),
        ({1}, '"{1}"'),
        (LOOP, "error: ValueError: Circular reference detected"),
        ({(1, 2): 3}, "error: TypeError: keys must be"),
        (Unprintable(), "error: OSError: no words"),
        (ZeroDivisionError("by zero"), "error: ZeroDivisionError: by zero"),
        (SystemExit(3), "error: SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_performing_gives_text_whatever_happens(result, text):
    assert perform(ToolCall("tool", {}), [make(result)]).startswith(text)


def test_wrong_names_and_arguments_are_told_to_the_model():
    tools = [Tool.of(weather)]
    assert perform(CALL, tools) == "Rome 2 True"
    assert 'did you mean "weather"' in perform(ToolCall("wether", {}), tools)
    assert "There are none" in perform(ToolCall("weather", {}), [])
    assert perform(ToolCall("weather", {"town": "Rome"}), tools).startswith("error: TypeError: ")
    assert perform(ToolCall("weather", {}, "was cut"), tools) == "error: was cut"


def test_ctrl_c_is_not_a_tool_s_failure():
    with pytest.raises(KeyboardInterrupt):
        perform(ToolCall("tool", {}), [make(KeyboardInterrupt())])
