"""Recipes in YAML: the same conversations as in Python, and a sentence for each that cannot be understood."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

from interlens import (
    AutoModelParticipant,
    ContextItem,
    Conversation,
    DropOldest,
    ElapsedTimeStopCondition,
    ModelParticipant,
    RandomSpeaker,
    ScriptedParticipant,
    SlidingWindow,
    StopStringCondition,
    Summarize,
    TokenBudget,
    TokenStopCondition,
    TurnStopCondition,
    archive,
    dataset_field,
    register_analyzer,
    written,
)
from interlens.errors import InterlensError, ModelError
from interlens.recipe import Recipe
from interlens.written import Written, read
from interlens.yamlfile import Misread
from tests import archive_code as code

TOP = Path(__file__).parents[1]
PEOPLE = "participants: [{name: a, script: [one, two, three]}, {name: b, script: [uno, dos]}]\n"


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Folders that a recipe adds to the import path are gone after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def wrote(tmp_path: Path):
    """Read a recipe of this text."""

    def make(text: str) -> Written:
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return read(tmp_path / "r.yaml")

    return make


def conversation(found: Written) -> Conversation:
    [conv] = found.conversations
    return conv


EVERYTHING = """
participants:
  - &model
    name: m
    model: tiny
    device: cpu
    dtype: float32
    kv_memory: 1048576
    system_prompt: ["You are ", {field: who}]
    private_context: [secret, {field: who}, {content: [Psst, {field: who}], at: 1}]
    temperature: 5e-1
    top_p: 0.9
    top_k: 7
    min_p: 0.01
    repetition_penalty: 1.1
    presence_penalty: 0.1
    frequency_penalty: 0.2
    logit_bias: {5: -.inf, 6: 1.5}
    stop: [END, "no"]
    max_new_tokens: 6
    seed: 4
    thinking: false
    kv_reuse: auto
    tools: tests.archive_code:double
    max_tool_iters: 2
    chat_template: "{{ messages }}"
  - {name: s, script: [on, "1"], max_new_tokens: 9, latency: 0.5, system_prompt: no}
  - {<<: *model, name: third, temperature: null, tools: null}
shared_context: ["Topic: ", {field: who}]
shared_system_prompt: {field: who}
moderator_name: chair
continue_prompt: More.
context_policy: {summarize: {by: s, instruction: Shorten.}}
context_limit: 900
reasoning_visibility: own
execution_mode: deterministic
next_speaker: {random: {repeat: true}}
turns: 3
until: {any: [{all: [{turns: 4}, {tokens: 9}]}, {string: [END, STOP]}, {seconds: 60}]}
budget: {per_conversation: {row_00000: 50, row_00001: 60}, per_turn: 5}
data: [{who: A, x: 1.5}, {who: Zoë, x: null}]
analyzers: {n: tests.archive_code:length}
name: all
seed: 11
run: {n: 2, samples: 3, devices: [cpu], out_dir: out, resume: true, extend: false, seed: 5,
      batched: false, max_batch_size: 4, stall_timeout: 9.5}
"""


def everything() -> Conversation:
    """What EVERYTHING says, in Python."""
    model = AutoModelParticipant.from_pretrained(
        "tiny",
        name="m",
        device="cpu",
        dtype="float32",
        kv_memory=1 << 20,
        system_prompt=("You are ", dataset_field("who")),
        private_context=(
            "secret",
            ContextItem(dataset_field("who")),
            ContextItem(("Psst", dataset_field("who")), at=1),
        ),
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={5: float("-inf"), 6: 1.5},
        stop=("END", "no"),
        max_new_tokens=6,
        seed=4,
        thinking=False,
        tools=(code.double,),
        max_tool_iters=2,
        chat_template="{{ messages }}",
    )
    scripted = ScriptedParticipant("s", ["on", "1"], max_new_tokens=9, latency=0.5, system_prompt="no")
    third = dataclasses.replace(model, name="third", temperature=None, tools=())
    return (
        Conversation(
            [model, scripted, third],
            shared_context=("Topic: ", dataset_field("who")),
            shared_system_prompt=dataset_field("who"),
            moderator_name="chair",
            continue_prompt="More.",
            context_policy=Summarize(scripted, "Shorten."),
            context_limit=900,
            reasoning_visibility="own",
            execution_mode="deterministic",
            next_speaker=RandomSpeaker(repeat=True),
        )
        .turns(3)
        .run_until(
            (TurnStopCondition(4) & TokenStopCondition(9))
            | StopStringCondition(["END", "STOP"])
            | ElapsedTimeStopCondition(60)
            | TokenBudget(per_conversation={"row_00000": 50, "row_00001": 60}, per_turn=5)
        )
        .data([{"who": "A", "x": 1.5}, {"who": "Zoë", "x": None}])
        .analyzer(n=code.length)
        .name("all")
        .seed(11)
    )


def test_yaml_says_what_python_says(wrote):
    found = wrote(EVERYTHING)
    assert archive.recipe_to_dict(conversation(found).recipe) == archive.recipe_to_dict(everything().recipe)
    options = dict(found.options)
    assert options.pop("out_dir").name == "out"
    assert options == {
        "n": 2,
        "samples": 3,
        "devices": ["cpu"],
        "resume": True,
        "extend": False,
        "seed": 5,
        "batched": False,
        "max_batch_size": 4,
        "stall_timeout": 9.5,
    }


def test_every_field_and_option_has_a_form():
    fields = {*written._FIELDS, "run_until", "message_hooks", "hooks"} - {"until", "budget"}
    assert fields == set(Recipe.settable())
    options = set(inspect.signature(Conversation.rollout).parameters) - {"self", "progress", "on_event"}
    assert set(written._RUN) == options
    loading = set(inspect.signature(AutoModelParticipant.from_pretrained).parameters) - {
        "id_or_path",
        "settings",
    }
    settings = {f.name for f in dataclasses.fields(ModelParticipant)} - {"backend"}
    assert set(written._MODEL) == loading | settings | {"model"}


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("drop_oldest", DropOldest()),
        ("{sliding_window: 4}", SlidingWindow(4)),
        ("error", "error"),
    ],
)
def test_context_policies(wrote, line: str, policy):
    assert conversation(wrote(PEOPLE + f"turns: 1\ncontext_policy: {line}")).recipe.context_policy == policy


def test_what_is_left_out_is_the_default(wrote):
    plain = Conversation([ScriptedParticipant("a", ["x"])]).turns(2)
    found = conversation(wrote("participants: [{name: a, script: [x]}]\nturns: 2\nnext_speaker: round_robin"))
    assert archive.recipe_to_dict(found.recipe) == archive.recipe_to_dict(plain.recipe)


def refused(wrote, text: str) -> str:
    with pytest.raises(Misread) as error:
        wrote(text)
    assert re.match(r".*r\.yaml, line \d+: ", str(error.value))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("turns: 1\nturns: 2", "line 2: the key turns stands in line 1 already"),
        ("- a", "the recipe takes a mapping; found a list"),
        ("turns: 1", "the recipe has no participants: write a list"),
        ("participants: []\nturns: 1", "the recipe has no participants"),
        ("participants: {name: a}\nturns: 1", "participants takes a list; found a mapping"),
        ("lineups: []", "the recipe holds no lineup"),
        ("lineups: {name: x}", "lineups takes a list of lineups; found a mapping"),
        ("lineups:\n- participants: []", "lineups[0] has no name"),
        ("lineups: [{name: x, participants: [{name: a, script: [x]}]}]", "lineups[0] would never stop"),
        (f"lineups:\n- &l {{name: x, {PEOPLE[:-1]}, turns: 1}}\n- *l", 'lineups[1].name is "x", which an'),
        ("turns: 1\nlineups: [{name: x}]", "line 1: turns is not known in a recipe with lineups"),
        ("lineups: [{name: x, run: {n: 1}}]", "lineups[0].run is not known in a lineup"),
        (PEOPLE, "the recipe would never stop: give it turns, or until"),
        (PEOPLE + "budget: {per_turn: 3}", "the recipe would never stop"),
        (PEOPLE + "turns: '3'", 'line 2: turns takes a whole number, at least 0; found the text "3"'),
        (PEOPLE + "turns:\nname: x", "line 2: turns has no value"),
        (PEOPLE + "turn: 3", 'turn is not known in a recipe: did you mean "turns"?'),
    ],
)
def test_a_recipe_that_cannot_be_understood(wrote, text: str, told: str):
    assert told in refused(wrote, text)


@pytest.mark.parametrize(
    ("person", "told"),
    [
        (
            "name: b, model: tiny, temprature: 1",
            '.temprature is not known in a participant: did you mean "temp',
        ),
        ("name: b", " has neither a model nor a script: write one of them"),
        ("name: b, model: tiny, script: [x]", " has both a model and a script: write one of them"),
        ("model: tiny", " has no name: give it one"),
        ("name: 12, script: [x]", ".name takes text; found the number 12: put it in quotes"),
        ("name: b, script: hello", '.script takes a list of replies; found the text "hello"'),
        ("name: b, script: [1]", ".script[0] takes text; found the number 1: put it in quotes"),
        ("name: b, script: [x], top_k: 1", ".top_k is not known in a participant with a script: There are"),
        ("name: b, model: tiny, latency: 1", ".latency is not known in a participant with a model"),
        ("name: b, script: [x], latency: -1", ".latency takes a number, at least 0; found the number -1"),
        ("name: b, model: tiny, dtype: fp8", " cannot be used: dtype is"),
        ("name: b, model: tiny, top_p: 3", " cannot be used: top_p must be in (0, 1], got 3"),
        ("name: b, model: tiny, temperature: '1'", '.temperature takes a number; found the text "1"'),
        (
            "name: b, model: tiny, trust_remote_code: yes",
            ".trust_remote_code takes true or false; found the te",
        ),
        ("name: b, model: tiny, thinking: 'true'", ".thinking takes auto, true or false; found the text"),
        ("name: b, model: tiny, logit_bias: {cat: 1}", '.logit_bias.cat is for "cat", and a bias is for the'),
        ("name: b, model: tiny, tools: double", '.tools takes module:function; found the text "double"'),
        ("name: b, model: tiny, private_context: {at: 1}", ".private_context has no content"),
        ("name: '', script: [x]", " cannot be used: a participant needs a name, got ''"),
    ],
)
def test_a_participant_that_cannot_be_understood(wrote, person: str, told: str):
    found = refused(wrote, f"participants:\n- {{name: a, script: [x]}}\n- {{{person}}}\nturns: 1")
    assert f"r.yaml, line 3: participants[1]{told}" in found


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("until: {tokens: 3, turns: 4}", "until has 2 keys, and a condition has one of: turns, tokens"),
        ("until: {}", "until has 0 keys"),
        ("until: {token: 3}", 'until.token is not known in a condition: did you mean "tokens"?'),
        ("until: {any: []}", "until.any is an empty list"),
        ("until: {any: [{string: ''}]}", "until.any[0].string cannot be used: StopStringCondition needs"),
        ("until: {seconds: -1}", "until.seconds takes a number, at least 0"),
        ("budget: {}", "budget cannot be used: a TokenBudget needs per_conversation or per_turn"),
        ("budget: {per_conversation: {row_00000: x}}", "budget.per_conversation.row_00000 takes a whole"),
        ("next_speaker: robin", 'next_speaker takes "round_robin" or "random"'),
        ("next_speaker: {random: {repeat: 1}}", "next_speaker.random.repeat takes true or false"),
        ("context_policy: {summarize: {by: bob}}", 'by takes "a" or "b"; found the text "bob"'),
        ("context_policy: {summarize: {}}", "context_policy.summarize does not say by whom"),
        (
            "context_policy: {sliding_window: 0}",
            "context_policy.sliding_window takes a whole number, at least",
        ),
        ("context_limit: 1e3", "context_limit takes a whole number, at least 1; found the number 1e3"),
        ("moderator_name: a", "the recipe cannot be used: 'a' is a participant and the moderator"),
        (
            "reasoning_visibility: none",
            'reasoning_visibility takes "strip" or "own" or "all"; found the text',
        ),
        ("shared_context: 2024", "shared_context takes text, {field: column} or a list of these"),
        ("shared_context: [{feild: q}]", "shared_context[0].feild is not known in a column of the row"),
        ("shared_context: {field: q}", "the recipe uses columns of a row"),
        ("data: rows.jsonl", "data cannot be used: there is no file"),
        ("data: rows.txt", "data cannot be used: rows are in a file that ends with .jsonl"),
        ("data: []", "data is an empty list"),
        ("data: [{q: 1, 2: x}]", "data[0].2 is a column called 2"),
        ("data: [q]", "data[0] takes a mapping of columns"),
        ("data: {dataset: x/y}", "data has no split: write {dataset: name, split: train}"),
        ("data: {name: x/y}", "data.name is not known in a data set of the hub"),
        ("analyzers: lenght", "no analyzer is registered as 'lenght'"),
        ("analyzers: nowhere_at_all:f", "analyzers names the module nowhere_at_all, which is neither in"),
        ("analyzers: tests.archive_code:lenght", 'has no lenght: did you mean "length"?'),
        ("analyzers: os:sep", "names os:sep, which is no function: found '/'"),
        ("analyzers: 'os:'", 'analyzers takes module:function; found the text "os:"'),
        ("analyzers: [os:getcwd]", "analyzers takes one analyzer, or several by name; found a list"),
        ("analyzers: {a b: os:getcwd}", "an analyzer is called as a Python name"),
        ("run: {sample: 2}", 'run.sample is not known in run: did you mean "samples"?'),
        ("run: {n: 0}", "run.n takes a whole number, at least 1; found the number 0"),
        ("run: {batched: off}", 'run.batched takes true or false; found the text "off"'),
        ("run: {devices: 0}", "run.devices takes text; found the number 0"),
    ],
)
def test_a_line_that_cannot_be_understood(wrote, line: str, told: str):
    assert told in refused(wrote, f"{PEOPLE}turns: 1\n{line}")


def test_a_model_that_is_not_there_is_told_with_its_place(wrote):
    with pytest.raises(
        ModelError, match=r'line 1: participants\[0\] cannot be made: .* did you mean "smollm2"'
    ):
        wrote("participants: [{name: a, model: smolm2}]\nturns: 1")


def test_a_data_set_that_cannot_be_reached_is_told_with_its_place(wrote):
    with pytest.raises(InterlensError, match=r"line 3: data cannot be loaded: \w+: "):
        wrote(PEOPLE + "turns: 1\ndata: {dataset: nobody/nothing, split: train}")


# -- running


def words(report) -> dict[str, list[str]]:
    return {job: [m.content for m in t] for job, t in report.transcripts().items()}


def test_a_recipe_runs_as_its_rollout_does(wrote):
    report = wrote(PEOPLE + "shared_context: Go.\nturns: 3\nrun: {n: 2, samples: 2, seed: 7}").run()
    people = [ScriptedParticipant("a", ["one", "two", "three"]), ScriptedParticipant("b", ["uno", "dos"])]
    same = Conversation(people, shared_context="Go.").turns(3).rollout(n=2, samples=2, seed=7)
    assert words(report) == words(same)
    assert [r.seed for r in report.results.values()] == [7, 7, 8, 8]


def test_lineups_run_in_one_pool_and_a_single_one_has_its_name_too(wrote):
    lineup = "- {name: %s, participants: [{name: a, script: [%s]}], turns: 1}\n"
    report = wrote("lineups:\n" + lineup % ("x", "one") + lineup % ("y", "two") + "run: {n: 2}").run()
    assert words(report) == {
        "x/rollout_00000": ["one"],
        "x/rollout_00001": ["one"],
        "y/rollout_00000": ["two"],
        "y/rollout_00001": ["two"],
    }
    assert list(wrote("lineups:\n" + lineup % ("x", "one")).run().results) == ["x"]


def test_paths_and_code_are_found_beside_the_file_from_anywhere(tmp_path: Path, monkeypatch):
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    (folder / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "data" / "rows.csv").write_text("q,gold\nZoë?,x\n好?,y\n", encoding="utf-8")
    (folder / "beside_the_recipe.py").write_text("def ask(conv):\n    return conv.row['gold'] * 2\n")
    (folder / "r.yaml").write_text(
        "participants: [{name: a, script: [yes]}]\nturns: 1\nshared_context: ['Q. ', {field: q}]\n"
        "data: data/rows.csv\nanalyzers: beside_the_recipe:ask\nrun: {out_dir: out}"
    )
    monkeypatch.chdir(elsewhere)
    report = read(Path("..") / "recipes" / "r.yaml").run()
    assert words(report) == {"row_00000": ["Q. Zoë?", "yes"], "row_00001": ["Q. 好?", "yes"]}
    assert report.analyses() == {"row_00000": "xx", "row_00001": "yy"}
    assert (folder / "out" / "manifest.json").exists()
    assert list(elsewhere.iterdir()) == []


def test_a_module_of_the_same_name_from_elsewhere_is_refused(tmp_path: Path, wrote):
    (tmp_path / "colorsys.py").write_text("def length(conv):\n    return 1\n")
    with pytest.raises(Misread, match=r"names colorsys, which is loaded from .*, not .*: rename the file"):
        wrote(PEOPLE + "turns: 1\nanalyzers: colorsys:length")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import nowhere_at_all\n", "which imports nowhere_at_all: that is not installed"),
        ("raise SystemExit(3)\n", "which cannot be imported: SystemExit: 3"),
        ("def f(:\n", "which cannot be imported: SyntaxError: "),
        ("1 / 0\n", "which cannot be imported: ZeroDivisionError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path, wrote, source: str, told: str):
    (tmp_path / "broken_beside_it.py").write_text(source)
    with pytest.raises(Misread, match=r"line 3: analyzers names broken_beside_it, ") as error:
        wrote(PEOPLE + "turns: 1\nanalyzers: broken_beside_it:f")
    assert told in str(error.value)


def test_a_registered_analyzer_goes_by_its_name(wrote):
    register_analyzer("test_written.turns", lambda conv: conv.n_turns)
    assert wrote(PEOPLE + "turns: 3\nanalyzers: test_written.turns").run().analyses() == {"rollout_00000": 3}


def test_a_model_folder_is_looked_for_beside_the_file(tmp_path: Path, wrote, monkeypatch):
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(ModelError, match=f"the folder {tmp_path / 'ckpt'} holds no config.json"):
        wrote("participants: [{name: a, model: ckpt}]\nturns: 1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "r").mkdir(parents=True)
    (tmp_path / "there" / "r.yaml").write_text("participants: [{name: a, model: ckpt}]\nturns: 1")
    with pytest.raises(Misread, match=r"model is a folder where you are, and there is no .*: write its"):
        read("there/r.yaml")


def test_a_data_set_folder_is_read_as_it_comes(tmp_path: Path, wrote):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"q": "A"}\n{"q": "B"}\n{"q": "C"}\n')
    text = PEOPLE + "turns: 1\nshared_context: {field: q}\nrun: {n: 2}\n"
    found = wrote(text + "data: {dataset: set, split: train}")
    assert not hasattr(conversation(found).recipe.data, "__len__")
    assert words(found.run()) == {"row_00000": ["A", "one"], "row_00001": ["B", "one"]}
    with pytest.raises(InterlensError, match="data cannot be loaded: ValueError: "):
        wrote(text + "data: {dataset: set, split: tset}")


def test_a_damaged_row_in_the_middle_is_told_by_file_and_line(tmp_path: Path, wrote):
    (tmp_path / "rows.jsonl").write_text('{"q": "A"}\n{"q": "B"\n')
    found = wrote(PEOPLE + "turns: 1\nshared_context: {field: q}\ndata: rows.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not JSON"):
        found.run()
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(Misread, match=r"data cannot be used: .*rows\.jsonl holds no row"):
        wrote(PEOPLE + "turns: 1\ndata: rows.jsonl")


def test_the_example_runs(tmp_path: Path):
    text = (TOP / "examples" / "debate.yaml").read_text(encoding="utf-8")
    assert text.count("model: smollm2") == 1
    (tmp_path / "debate.yaml").write_text(text.replace("smollm2", "tiny"), encoding="utf-8")
    report = read(tmp_path / "debate.yaml").run()
    assert [len(t) for t in report.transcripts().values()] == [5, 5]
    assert {m.author for m in report["rollout_00000"].transcript} == {"moderator", "ana", "ben"}
