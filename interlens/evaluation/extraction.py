r"""What of a reply is its answer: a tag, a box, a number, a letter, a line, a pattern.

An extractor reads a text without reasoning; `extract` takes the reasoning away first. Nothing found, or only
whitespace, is `None`. No text makes one of these raise, and each takes time linear in the text (`Pattern`:
as its expression does).

>>> extract("<think>5?</think> It is \\boxed{1{,}234}.", First(Boxed(), Numeric()))
'1{,}234'
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from interlens.chat.reasoning import split
from interlens.errors import nearest
from interlens.evaluation.numerals import last_number
from interlens.templating import describe_callable

Which = Literal["last", "first"]


class Extractor:
    """Reads the answer out of a reply; a subclass has at least an `extract`."""

    @property
    def name(self) -> str:
        """What it is called."""
        return type(self).__name__

    @property
    def label(self) -> str:
        """What it is called in reports: unlike `name`, it says what is read and how."""
        return self.name

    @property
    def hint(self) -> str:
        """The sentence by which a prompt asks for what it reads."""
        return ""

    def extract(self, text: str) -> str | None:
        """The answer in a text without reasoning, or `None`."""
        raise NotImplementedError(f"{type(self).__name__} has no extract")

    def asks(self, prompt: str) -> bool:
        """Whether a prompt asks for what it reads."""
        return True

    def describe(self) -> Any:
        """What results depend on, as JSON. `by_name` makes the same extractor of it, if it is one of ours."""
        for kind, made in EXTRACTORS.items():
            if type(self) is made:
                return {kind: dict(vars(self))}
        return {"type": describe_callable(type(self)), "extract": describe_callable(self.extract)}


@dataclass(frozen=True)
class Tag(Extractor):
    """What stands inside `<name>…</name>`, in any case. Of nested tags, the innermost.

    A last tag that was never closed (a reply that was cut short) is no answer, whatever stands before it;
    `unclosed=True` reads it to the end of the text.
    """

    name: str = "answer"
    which: Which = "last"
    unclosed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[^\W\d][\w.:-]*", self.name):
            raise ValueError(f"a tag has a name without brackets, such as answer; got {self.name!r}")
        _check_which(self.which)

    @property
    def label(self) -> str:
        return f"tag {self.name}"

    @property
    def hint(self) -> str:
        return f"Give your final answer inside <{self.name}></{self.name}> tags."

    def extract(self, text: str) -> str | None:
        """What stands in the tag; the innermost opening before a closing one is its own."""
        opened: int | None = None  # where the content of a tag begins that is not closed yet
        found: tuple[int, int] | None = None
        for tag in _tags(self.name).finditer(text):
            if not tag[1]:
                opened = tag.end()
            elif opened is not None:
                found, opened = (opened, tag.start()), None
                if self.which == "first":
                    break
        if opened is not None and (found is None or self.which == "last"):
            return _filled(text[opened:]) if self.unclosed else None
        return _filled(text[found[0] : found[1]]) if found else None

    def asks(self, prompt: str) -> bool:
        name = re.escape(self.name)
        return bool(re.search(rf"<{name}\b|(?<!\w){name}[\"'`*]?\s+tags?\b", prompt, re.IGNORECASE))


@dataclass(frozen=True)
class Boxed(Extractor):
    r"""What stands inside the last `\boxed{…}` or `\fbox{…}`, the innermost of nested ones. Braces count
    unless escaped; a last box that was never closed is no answer.
    """

    name = "boxed"
    hint = r"Put your final answer inside \boxed{}."

    def extract(self, text: str) -> str | None:
        box = _last(re.finditer(r"\\(?:boxed|fbox)\s*+\{", text))
        depth = 1
        for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, box.end()) if box else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0 and box:
                return _filled(text[box.end() : brace.start()])
        return None

    def asks(self, prompt: str) -> bool:
        return bool(re.search(r"(?i)boxed|fbox|\bin(?:side)? an? box\b", prompt))


@dataclass(frozen=True)
class Numeric(Extractor):
    r"""The last number, written in one way: no separators, currency, plus or needless zeros.

    `$1,234.50` and `1 234.50` are `1234.5`, `3 \times 10^8` is `3e8`, `\frac{3}{4}` is `3/4` (not reduced),
    `3 1/2` is `3.5`, and `50%` stays `50%`. Digits in words, ordinals, exponents and powers (`2^10`, `2**10`)
    are no numbers.
    """

    name = "numeric"
    hint = "End with your final answer as a number."

    def extract(self, text: str) -> str | None:
        return last_number(text)


@dataclass(frozen=True)
class MultipleChoice(Extractor):
    r"""The letter of an option, as a capital: the last that is said to be the answer (`answer is B`,
    `Answer: (B)`), else the last that is marked (`(B)`, `B.`, `B)`, `**B**`, `\boxed{B}`, a line of its own),
    else the last capital that stands alone. The article "A" and the pronoun "I" are none.
    """

    options: str = "ABCD"

    name = "multiple_choice"

    def __post_init__(self) -> None:
        given = self.options
        if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z]{2,26}", given):
            raise ValueError(f'options are two or more letters, such as "ABCD"; got {given!r}')
        object.__setattr__(self, "options", given.upper())
        if len(set(self.options)) < len(given):
            raise ValueError(f"an option stands twice in {given!r}; name each letter once")

    @property
    def label(self) -> str:
        return f"multiple choice {self.options}"

    @property
    def hint(self) -> str:
        return f"Answer with one letter: {', '.join(self.options[:-1])} or {self.options[-1]}."

    def extract(self, text: str) -> str | None:
        found = next((found for kind in _letters(self.options) if (found := kind.match(text))), None)
        return found[found.lastindex or 0].upper() if found else None

    def asks(self, prompt: str) -> bool:
        return all(re.search(rf"(?<!\w)(?:{o}|{o.lower()}\))(?!\w)", prompt) for o in self.options[:2])


@cache
def _letters(options: str) -> tuple[re.Pattern[str], ...]:
    """Expressions, the most telling first, that each match up to the last letter of their kind; the letter
    is the only group that took part.
    """
    small = options.lower()
    words = "".join(o for o in options if o in "AI")  # those that are a word of English too
    plain = "".join(o for o in options if o not in words)
    apart, ends = r"(?<![^\W_])(?<![.'’\-])", r"(?![^\W_]|_[^\W_]|['’]\w|[+#]|-\w|\.[A-Z]\.)"
    no_word = r"(?![ \t]++(?!(?:is|because|since|seems)\b)[\"'“‘]?[^\W_])"
    capital = "|".join(
        ([f"([{plain}]){ends}"] if plain else []) + ([f"([{words}]){ends}{no_word}"] if words else [])
    )
    either = rf"([{options}{small}]){ends}"
    closing = r"(?=[*_`\"'”’)\]}$.]{0,8}[ \t]*+(?:[\n,;:<]|\Z))"
    said = rf"""
        (?<![^\W_]) (?i:answers?(?:[ ](?:choice|option|letter))? | (?:best|correct|right)[ ](?:choice|option))
        [*_]{{0,3}}
        (?: \s{{1,3}} (?i:is|would[ ]be|should[ ]be|must[ ]be)\b | \s{{0,3}}[:=>→] | \s{{1,3}}[-–—]\s )
        (?: [\s*_`"'“‘(\[{{$:] | \\[a-zA-Z]{{1,10}} | (?i:the|option|choice|letter|correct)\b ){{0,16}}
        (?: {capital} | ([{small}]){ends}{closing} )
      | {apart} ([{options}]) [)\]*_"'.:]{{0,4}}
            [ ]is[ ]the[ ](?:correct|right|best)[ ](?:answer|option|choice)\b
    """
    marked = rf"""
        (?<![\w)]) (?: \([ *_]{{0,3}} {either} [ *_]{{0,3}}\) | \[[ *_]{{0,3}} {either} [ *_]{{0,3}}\] )
      | {apart}(?<![(\[]) (?: ([{options}]) [.:] (?!\w) | {either} \) )
      | (?<![\w*`]) (?: [*_]{{1,3}} ([{options}]) [.):]? [*_]{{1,3}} | ["“'‘`] ([{options}]) ["”'’`] ) (?!\w)
      | \\(?:boxed|fbox|text|textbf|mathrm|mathbf) \s?\{{ [ (]{{0,2}} ([{options}]) [ )]{{0,2}} \}}
      | (?m:^) [ \t>#*_-]{{0,8}} {either} [ \t*_.)$]{{0,8}} (?m:$)
    """
    alone = rf"{apart} (?: {capital} ) | (?i:\b(?:option|choice)[ ]) ([{options}]){ends}"
    # Each kind begins with a question that costs little; for what is marked, also whether a letter is near.
    any_case = f"Aa{options}{small}"
    near = rf"(?=[^{any_case}]{{0,14}}+[{any_case}])"
    kinds = (
        rf"(?=[Aa][Nn]|[BbCcRr][EeOoIi]|[{options}])(?:{said})",
        rf"(?=[(\[*_\"'“‘`\\ \t>#{any_case}-]){near}(?:{marked})",
        rf"(?=[{options}OoCc])(?:{alone})",
    )
    return tuple(re.compile(f"(?s:.*){kind}", re.VERBOSE) for kind in kinds)


_PREFIX = re.compile(
    r"([*_]{1,3})?(?:(?:the|my)\s+)?(?:final\s+)?answer(?:\s+is)?\s*(?:\1\s*[:：]|[:：]\s*\1|[:：])\s*",
    re.IGNORECASE,
)
_RULE = re.compile(r"`{3,}\S*|~{3,}\S*|-{3,}|={3,}|\*{2,}|_{2,}")


@dataclass(frozen=True)
class LastLine(Extractor):
    """The last line that says something, without emphasis around it and without `Answer:` before it."""

    name = "last_line"
    hint = "Give your final answer alone on the last line."

    def extract(self, text: str) -> str | None:
        for line in reversed(text.splitlines()):
            line = line.strip()
            if line and not _RULE.fullmatch(line):
                return _filled(_bare(re.sub(r"^#{1,6}\s+", "", line)))
        return None


def _bare(line: str) -> str:
    """The line without emphasis around it and without the prefix, whichever is outside."""
    for _ in range(8):  # more than anybody writes around each other
        for mark in ("***", "**", "__", "*", "_", "`"):
            inner = line[len(mark) : -len(mark)]
            if inner and mark not in inner and line.startswith(mark) and line.endswith(mark):
                line = inner.strip()
                break
        else:
            line = _PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line
    return line


@dataclass(frozen=True)
class Pattern(Extractor):
    """A group of a match of a regular expression: group 1 where it has groups, else the whole match."""

    regex: str
    group: int | None = None
    which: Which = "last"

    name = "pattern"

    def __post_init__(self) -> None:
        if not isinstance(self.regex, str):
            raise TypeError(f"a pattern is a regular expression as text; got {type(self.regex).__name__}")
        try:
            groups = re.compile(self.regex).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{self.regex!r} is no regular expression: {error}; correct it") from error
        if self.group is None:
            object.__setattr__(self, "group", min(groups, 1))
        elif not isinstance(self.group, int) or not 0 <= self.group <= groups:
            raise ValueError(f"{self.regex!r} has groups 0 to {groups}; group {self.group!r} was asked for")
        _check_which(self.which)

    @property
    def label(self) -> str:
        return f"pattern {self.regex}"

    @property
    def hint(self) -> str:
        return f"Write your final answer so that it matches {self.regex}"

    def extract(self, text: str) -> str | None:
        matches = re.finditer(self.regex, text)
        found = _last(matches) if self.which == "last" else next(matches, None)
        return _filled(found[self.group or 0] or "") if found else None


@dataclass(frozen=True)
class Whole(Extractor):
    """The whole text, without whitespace around it."""

    name = "whole"
    hint = "Reply with the answer only."

    def extract(self, text: str) -> str | None:
        return _filled(text)


@dataclass(frozen=True, init=False)
class First(Extractor):
    """The answer of the first extractor that finds one."""

    extractors: tuple[Extractor, ...]

    name = "first"

    def __init__(self, *extractors: Extractor) -> None:
        if not extractors:
            raise ValueError("a chain has at least one extractor; got none")
        for one in extractors:
            if not isinstance(one, Extractor):
                raise TypeError(
                    f"a chain is made of extractors; got {one!r:.80}; by_name makes one of a name"
                )
        object.__setattr__(self, "extractors", extractors)

    @property
    def label(self) -> str:
        return f"first of {', '.join(one.label for one in self.extractors)}"

    @property
    def hint(self) -> str:
        return self.extractors[0].hint

    def extract(self, text: str) -> str | None:
        return next((found for one in self.extractors if (found := one.extract(text)) is not None), None)

    def found_by(self, text: str) -> str | None:
        """The label of the extractor that finds the answer in a reply; `None` if none does."""
        answer = answer_part(text)
        for one in self.extractors if answer is not None else ():
            if one.extract(answer or "") is not None:
                return one.found_by(text) if isinstance(one, First) else one.label
        return None

    def asks(self, prompt: str) -> bool:
        return any(one.asks(prompt) for one in self.extractors)

    def describe(self) -> Any:
        return [one.describe() for one in self.extractors]


EXTRACTORS: dict[str, type[Extractor]] = {
    "tag": Tag,
    "boxed": Boxed,
    "numeric": Numeric,
    "multiple_choice": MultipleChoice,
    "last_line": LastLine,
    "pattern": Pattern,
    "whole": Whole,
}
"""What a config may name; a list of them is a chain."""


def answer_part(text: str, waits_for: str | None = None) -> str | None:
    """A reply without its reasoning; `None` where nothing follows that, or it was never closed.

    `waits_for` is the closing tag of reasoning that the prompt had opened (`chat.reasoning.opened_by`).
    """
    parted = split(text, waits_for, cut=False)
    if parted.reasoning is not None and parted.start == len(text):
        return None
    return text[parted.start :]


def extract(text: str, extractor: Extractor, *, waits_for: str | None = None) -> str | None:
    """The answer in a reply, reasoning taken away first; `None` where there is none."""
    answer = answer_part(text, waits_for)
    return None if answer is None else extractor.extract(answer)


def by_name(spec: Any) -> Extractor:
    """The extractor of a config: a name, `{name: settings}` (the first setting alone, or a mapping), or a
    list, which is a chain.

    >>> by_name(["boxed", {"tag": "result"}])
    First(extractors=(Boxed(), Tag(name='result', which='last', unclosed=False)))
    """
    if isinstance(spec, Extractor):
        return spec
    if isinstance(spec, list | tuple):
        return First(*(by_name(one) for one in spec))
    if isinstance(spec, str):
        spec = {spec: None}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise TypeError(
            "an extractor is a name, a mapping from one name to its settings, or a list of these; "
            f"got {spec!r:.80}"
        )
    [(name, given)] = spec.items()
    made = EXTRACTORS.get(str(name))
    if made is None:
        raise ValueError(f"there is no extractor {name!r}; {nearest(str(name), EXTRACTORS)}")
    return made(**_settings(name, made, given))


def _settings(name: str, made: type[Extractor], given: Any) -> dict[str, Any]:
    """What a config gives an extractor, by the names of its settings."""
    known = list(getattr(made, "__dataclass_fields__", {}))
    settings = {} if given is None else dict(given) if isinstance(given, Mapping) else None
    if settings is None:
        if not known:
            raise ValueError(f"{name} has no settings; got {given!r:.80}; write the name alone")
        settings = {known[0]: given}
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{name} has no setting {setting!r}; {nearest(str(setting), known)}")
    if made is Pattern and "regex" not in settings:
        raise ValueError('a pattern needs its regular expression; write {"pattern": "…"}')
    return settings


def mismatch(extractor: Extractor, prompt: str) -> str | None:
    """A sentence where a prompt does not ask for what the extractor reads, else `None`."""
    if extractor.asks(prompt):
        return None
    if isinstance(extractor, MultipleChoice):
        what = f"answers are one of {', '.join(extractor.options)}, and the prompt lists no such options"
    else:
        what = f"answers are read by {extractor.label}, and the prompt never asks for it"
    ask = f'; say in the prompt "{extractor.hint}"' if extractor.hint else "; ask for it in the prompt"
    return f"{what}{ask}, or choose another extractor"


def _filled(text: str) -> str | None:
    return text.strip() or None


def _last(found: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(found, maxlen=1)), None)


def _check_which(which: str) -> None:
    if which not in ("last", "first"):
        raise ValueError(f'which is "last" or "first"; got {which!r}')


@cache
def _tags(name: str) -> re.Pattern[str]:
    """Opening and closing tags of this name; group 1 is the slash of a closing one."""
    return re.compile(rf"<(/?){re.escape(name)}\s*+(?:(?<=\s)[^<>]*+)?>", re.IGNORECASE)
