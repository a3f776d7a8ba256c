"""Recipes written in YAML: another way to write the arguments of participants, conversations and `rollout`.

`read("recipe.yaml").run()`. Paths in the file are relative to its folder, and its code is found there. A key
that is not known is refused with the nearest one; the forms of values are in `plainforms`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from interlens import plainforms, rollouts, stop
from interlens.chat.reasoning import Visibility
from interlens.conversation import Conversation
from interlens.errors import ModelError
from interlens.participants import Participant, ScriptedParticipant
from interlens.plainforms import Read, template, values
from interlens.pretrained import AutoModelParticipant
from interlens.program import either
from interlens.recipe import Mode
from interlens.runner.progress import Observer
from interlens.runner.report import RunReport
from interlens.yamlfile import Found, Source, load, read_text


def _at_least(least: int) -> Read:
    return lambda found: found.whole(least)


_PERSON: dict[str, Read] = {
    "name": Found.text,
    "system_prompt": template,
    "private_context": plainforms.private_context,
    "max_new_tokens": _at_least(1),
}
_SCRIPTED: dict[str, Read] = _PERSON | {
    "script": lambda f: [item.text() for item in f.items("a list of replies")],
    "latency": lambda f: f.number(0),
}
_MODEL: dict[str, Read] = _PERSON | {
    "model": plainforms.folder_or_id,
    "adapter": plainforms.folder_or_id,
    "trust_remote_code": Found.flag,
    "max_memory": lambda f: {k: v.whole(1) if v.kind == "int" else v.text() for k, v in f.pairs()},
    "kv_memory": _at_least(0),
    "logit_bias": lambda f: _logit_bias(f),
    "stop": Found.texts,
    "top_k": Found.whole,
    "seed": Found.whole,
    "thinking": plainforms.auto_or_flag,
    "kv_reuse": plainforms.auto_or_flag,
    "tools": plainforms.codes,
    "max_tool_iters": _at_least(0),
    **dict.fromkeys(("backend", "device", "dtype", "revision", "quant", "chat_template"), Found.text),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), Found.number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), Found.number),
}
_BEGIN: dict[str, Read] = {
    "shared_context": template,
    "shared_system_prompt": template,
    "moderator_name": Found.text,
    "continue_prompt": Found.text,
    "next_speaker": plainforms.next_speaker,
    "context_limit": _at_least(1),
    "reasoning_visibility": lambda f: f.choice(get_args(Visibility)),
    "execution_mode": lambda f: f.choice(get_args(Mode)),
}
"""What a conversation is made with; beside it stand `participants` and `context_policy`."""
_SET: dict[str, Read] = {
    "turns": _at_least(0),
    "data": plainforms.data,
    "name": Found.text,
    "seed": Found.whole,
}
_FIELDS = ("participants", *_BEGIN, "context_policy", *_SET, "until", "budget", "analyzers")
_RUN: dict[str, Read] = {
    **dict.fromkeys(("n", "samples", "max_batch_size"), _at_least(1)),
    **dict.fromkeys(("resume", "extend", "batched"), Found.flag),
    "seed": Found.whole,
    "stall_timeout": lambda f: f.number(0),
    "devices": lambda f: list(f.texts()) if f.kind == "seq" else f.text(),
    "out_dir": lambda f: f.source.folder / Path(f.text()).expanduser(),
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a file says: conversations, and how they are run."""

    conversations: tuple[Conversation, ...]
    options: Mapping[str, Any]
    """The arguments of `rollout`."""
    pooled: bool
    """Whether they stand under `lineups`, so that ids begin with their names."""
    text: str
    source: Source

    def run(
        self,
        *,
        out_dir: str | Path | None = None,
        progress: bool | None = None,
        on_event: Observer | None = None,
    ) -> RunReport:
        """Run it as the file says; `out_dir` stands for the one in the file."""
        options = {**self.options, "progress": progress, "on_event": on_event}
        if out_dir is not None:
            options["out_dir"] = out_dir
        if self.pooled:
            return rollouts.run(self.conversations, **options)
        return self.conversations[0].rollout(**options)

    def __repr__(self) -> str:
        return f"Written({self.source.file}: {', '.join(map(repr, self.conversations))})"


def read(path: str | Path) -> Written:
    """Read a recipe; what cannot be understood is refused by line and place, before anything is run."""
    file = Path(path)
    return understand(read_text(file), Source(file, file.absolute().parent.resolve()))


def understand(text: str, source: Source) -> Written:
    """Make conversations of the text of a recipe."""
    top = load(text, source)
    pooled = any(key == "lineups" for key, _ in top.pairs())
    known = ["lineups", "run"] if pooled else [*_FIELDS, "run"]
    given = top.fields(
        known, "a recipe with lineups (its own part is in each of them)" if pooled else "a recipe"
    )
    if pooled:
        conversations = _lineups(given["lineups"]) if "lineups" in given else ()
    else:
        conversations = (_conversation(top, given),)
    if not conversations:
        raise top.refuse("holds no lineup: write a list of them, each with a name and participants")
    options = values(given["run"], _RUN, "run") if "run" in given else {}
    return Written(conversations=conversations, options=options, pooled=pooled, text=text, source=source)


def _lineups(found: Found) -> tuple[Conversation, ...]:
    made: dict[str, Conversation] = {}
    for item in found.items("a list of lineups"):
        given = item.fields(_FIELDS, "a lineup")
        if "name" not in given:
            raise item.refuse("has no name: ids of results begin with it, so give it one")
        name = given["name"].text()
        if name in made:
            raise given["name"].refuse(f'is "{name}", which an earlier lineup is called: names must differ')
        made[name] = _conversation(item, given)
    return tuple(made.values())


def _conversation(top: Found, given: Mapping[str, Found]) -> Conversation:
    """A conversation of the fields of a mapping."""
    people = [_participant(item) for item in given["participants"].items()] if "participants" in given else []
    if not people:
        raise top.refuse("has no participants: write a list, each with a name and a model or a script")
    begin = {name: reader(given[name]) for name, reader in _BEGIN.items() if name in given}
    if "context_policy" in given:
        begin["context_policy"] = plainforms.context_policy(given["context_policy"], people)
    later = {name: reader(given[name]) for name, reader in _SET.items() if name in given}
    later["run_until"] = _end(top, given)
    with top.building():
        conv: Conversation = Conversation(people, **begin).set(**later)
    if "analyzers" in given:
        conv = _analyzed(conv, given["analyzers"])
    if conv.recipe.needs_row and conv.recipe.data is None:
        raise top.refuse("uses columns of a row ({field: ...}) and has no data: name a file of rows in data")
    return conv


def _end(top: Found, given: Mapping[str, Found]) -> stop.StopCondition | None:
    """What ends a conversation beside its turns; nothing at all is refused."""
    until = plainforms.until(given["until"]) if "until" in given else None
    budget = plainforms.budget(given["budget"]) if "budget" in given else None
    spent = budget is not None and budget.per_conversation is not None
    if "turns" not in given and until is None and not spent:
        raise top.refuse("would never stop: give it turns, or until, or a budget with per_conversation")
    end: stop.StopCondition | None = either(until, budget)
    return end


def _analyzed(conv: Conversation, found: Found) -> Conversation:
    made = plainforms.analyzers(found)
    conv = conv.analyzer(**made) if isinstance(made, dict) else conv.analyzer(made)
    try:
        conv.recipe.describe()
    except ValueError as error:  # a registered name that is none
        raise found.refuse(f"cannot be used: {error}; an import path is written module:function") from error
    return conv


def _participant(found: Found) -> Participant:
    """A local model, or a script."""
    given = found.fields({**_MODEL, **_SCRIPTED}, "a participant")
    if ("model" in given) == ("script" in given):
        have = "both a model and a script" if "model" in given else "neither a model nor a script"
        raise found.refuse(f"has {have}: write one of them")
    if "name" not in given:
        raise found.refuse("has no name: give it one")
    if "script" in given:
        said = values(found, _SCRIPTED, "a participant with a script")
        with found.building():
            return ScriptedParticipant(**said)
    said = values(found, _MODEL, "a participant with a model")
    try:
        with found.building():
            return AutoModelParticipant.from_pretrained(said.pop("model"), **said)
    except ModelError as error:
        raise type(error)(str(found.refuse(f"cannot be made: {error}"))) from error


def _logit_bias(found: Found) -> dict[int, float]:
    out = {}
    for token, added in found.pairs():
        if not isinstance(token, int):
            raise added.refuse(f'is for "{token}", and a bias is for the id of a token: write its number')
        out[token] = added.number(infinite=True)
    return out
