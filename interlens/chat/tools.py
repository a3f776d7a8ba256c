"""Tools: how they are described to a model, and how its calls are read. The format follows the template.

| template | description | a call looks like |
|---|---|---|
| speaks of `<tool_call>` (Hermes, Qwen) | its own | `<tool_call>{"name": …, "arguments": …}</tool_call>` |
| has `<|python_tag|>` (Llama 3) | its own | `{"name": …, "parameters": {…}}` |
| has `<start_of_turn>` (Gemma) | ours, in the system block | a fenced `tool_code` block, one Python call |
| anything else | ours, in the system block | as in the first row |
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from interlens.errors import nearest

Format = Literal["json", "llama", "gemma"]
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function a model may call; its signature is the schema, its docstring the description."""

    fn: Callable[..., Any]
    name: str
    schema: Mapping[str, Any]
    """The function in the form of the OpenAI API: `{"type": "function", "function": {…}}`."""

    @classmethod
    def of(cls, fn: "Callable[..., Any] | Tool") -> "Tool":
        """Describe a plain function."""
        if isinstance(fn, Tool):
            return fn
        if not callable(fn) or not getattr(fn, "__name__", "").isidentifier():
            raise TypeError(f"a tool is a named function, got {fn!r}")
        try:
            hints = get_type_hints(fn)
        except NameError:
            hints = {}
        properties, needed = {}, []
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"a tool is called with named arguments, which {parameter} of {fn.__name__} is not"
                )
            properties[name] = _json_type(hints.get(name, str))
            if parameter.default is inspect.Parameter.empty:
                needed.append(name)
        parameters = {"type": "object", "properties": properties, "required": needed}
        about = inspect.getdoc(fn) or fn.__name__
        schema = {
            "type": "function",
            "function": {"name": fn.__name__, "description": about, "parameters": parameters},
        }
        return cls(fn, fn.__name__, schema)


def _json_type(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type; what JSON has no word for is a string."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _JSON_TYPES.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, UnionType):
        kinds = [_json_type(i) for i in inner if i is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is list and inner:
        return {"type": "array", "items": _json_type(inner[0])}
    return {"type": _JSON_TYPES.get(origin or hint, "string")}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asked for; `error` says why it could not be read."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    id: str | None = None
    """The name a hosted model gave to the call."""

    def stored(self) -> dict[str, Any]:
        """The call as JSON, its arguments as they came."""
        found = {"name": self.name, "arguments": dict(self.arguments), "error": self.error}
        if self.id is None:
            return found
        return found | {"id": self.id, "arguments": json.dumps(self.arguments)}

    @classmethod
    def of_text(cls, name: str, arguments: str, id: str) -> "ToolCall":
        """A call whose arguments came as text."""
        try:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise TypeError("arguments are an object")
        except (ValueError, TypeError, RecursionError) as error:
            return cls(name, {}, f"the arguments could not be read as JSON: {error}", id)
        return cls(name, given, None, id)


def format_of(source: str | None) -> Format:
    """The call format that a template's text asks for."""
    text = source or ""
    if "<tool_call>" in text:
        return "json"
    if "<|python_tag|>" in text or "Environment: ipython" in text:
        return "llama"
    return "gemma" if "<start_of_turn>" in text else "json"


def described_by_template(source: str | None) -> bool:
    """Whether the template itself lists the tools it is given."""
    return bool(source and re.search(r"\btools\b", source))


def description(tools: Sequence[Tool], form: Format) -> str:
    """The system text for a template that lists no tools."""
    return description_of([t.schema for t in tools], form)


def description_of(schemas: Sequence[Mapping[str, Any]], form: Format) -> str:
    """The same for tools that are known by their schemas."""
    listed = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    how = {
        "json": '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>',
        "llama": '{"name": NAME, "parameters": {…}}',
        "gemma": "a fenced block marked tool_code that holds one Python call",
    }[form]
    return f"You may use these tools:\n{listed}\nTo call one, reply with {how} and nothing else."


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in a message, in OpenAI's form or in the flat one, as `id`, `name` and `arguments` (text)."""
    inner = call.get("function", call)
    given = inner.get("arguments", "{}")
    text = given if isinstance(given, str) else json.dumps(given)
    return {"id": call.get("id", ""), "name": inner["name"], "arguments": text}


def written(call: Mapping[str, Any], form: Format) -> str:
    """A call as a model would have written it."""
    given = json.loads(call["arguments"] or "{}")
    if form == "gemma":
        words = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"```tool_code\n{call['name']}({words})\n```"
    if form == "llama":
        return json.dumps({"name": call["name"], "parameters": given})
    return f"<tool_call>{json.dumps({'name': call['name'], 'arguments': given})}</tool_call>"


def parse(text: str, form: Format) -> list[ToolCall]:
    """Read the calls out of a reply; an empty list means that it is an answer."""
    if form == "json":
        return [
            _from_json(body)
            for body in re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", text, re.DOTALL)
        ]
    if form == "llama":
        body = text.replace("<|python_tag|>", "").strip()
        return [_from_json(body)] if body.startswith("{") and '"name"' in body else []
    return [_from_python(body) for body in re.findall(r"```tool_code\s*(.*?)\s*(?:```|$)", text, re.DOTALL)]


def _from_json(body: str) -> ToolCall:
    try:
        data = json.loads(body)
        arguments = data.get("arguments", data.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(data["name"], str) or not isinstance(arguments, dict):
            raise TypeError("the name is text and the arguments are an object")
        return ToolCall(data["name"], arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return ToolCall("", {}, f"the call could not be read as JSON with a name and arguments: {error}")


def _from_python(body: str) -> ToolCall:
    body = re.sub(r"^print\((.*)\)$", r"\1", body.strip(), flags=re.DOTALL)
    try:
        call = ast.parse(body, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("expected one call with keyword arguments")
        name = ast.unparse(call.func)
        return ToolCall(name, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return ToolCall("", {}, f"the call could not be read as one Python call: {error}")


def perform(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Run one call; whatever goes wrong is told to the model as text, as a failed tool would."""
    if call.error is not None:
        return f"error: {call.error}"
    known = {t.name: t for t in tools}
    if call.name not in known:
        return f"error: there is no tool {call.name!r}; {nearest(call.name, known)}"
    try:
        result = known[call.name].fn(**call.arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
    except (Exception, SystemExit) as error:  # a tool's failure is the model's to handle
        return f"error: {type(error).__name__}: {error}"
