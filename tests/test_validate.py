"""Types, ranges and rules of the settings: each refusal names the setting and what it may be."""

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import pytest
from conftest import BUILT_IN

from evaluate import EvaluateConfig
from extend import ExtendConfig
from model import GPT, POSITIONS, GPTConfig
from nanolong import validate
from nanolong.errors import UserError
from sample import SampleConfig
from train import TrainConfig


@dataclass
class Settings:
    """A field of every type that settings have."""

    number: int = 1
    fraction: float = 0.5
    switch: bool = False
    word: str = ""
    maybe: bool | None = None
    choice: Literal["a", "b"] = "a"
    lengths: tuple[int, ...] = ()
    choices: tuple[Literal["a", "b"], ...] = ("a",)
    table: dict | None = None


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("number", "12", 12),
        ("number", "1e3", 1000),
        ("number", "1_000", 1000),
        ("number", 4.0, 4),
        ("number", np.int64(7), 7),
        ("number", "9007199254740993", 2**53 + 1),
        ("fraction", 1, 1.0),
        ("fraction", "2.5e-3", 0.0025),
        ("fraction", np.float32(0.5), 0.5),
        ("switch", "yes", True),
        ("switch", "OFF", False),
        ("switch", True, True),
        ("word", "none", "none"),
        ("maybe", "auto", None),
        ("maybe", "none", None),
        ("maybe", None, None),
        ("maybe", "true", True),
        ("choice", "b", "b"),
        ("lengths", "16, 32", (16, 32)),
        ("lengths", [16, 32], (16, 32)),
        ("lengths", 16, (16,)),
        ("lengths", "", ()),
        ("choices", "b,a", ("b", "a")),
        ("table", {"x": 1}, {"x": 1}),
    ],
)
def test_values_are_converted_to_the_type_of_their_field(name, value, expected):
    converted = getattr(validate.coerce(Settings, {name: value}, "here"), name)
    assert converted == expected
    assert type(converted) is type(expected)


WRONG = {
    "number": ["four", 2.5, True, None, "inf", "nan", 10**30, "9" * 5000, {}],
    "fraction": [True, "half", 10**400, [0.5]],
    "switch": ["perhaps", None],
    "word": [3],
    "choice": ["c", ["a"]],
    "lengths": ["16,x", [[16]]],
    "choices": ["a,c"],
    "table": [3],
}
WANTED = {
    "number": "a whole number",
    "fraction": "a number",
    "switch": "true or false",
    "word": "text",
    "choice": "one of a, b",
    "lengths": "a whole number",
    "choices": "one of a, b",
    "table": "an object",
}


@pytest.mark.parametrize("name, value", [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_value_of_another_type_is_refused(name, value):
    message = f"^meta.json: {name} = .*{name} must be {WANTED[name]}$"
    with pytest.raises(UserError, match=message):
        validate.coerce(Settings, {name: value}, "meta.json")


def test_numbers_of_numpy_are_taken_and_saved_as_pythons(tmp_path):
    model = GPT(GPTConfig(vocab_size=np.int64(10), n_layer=1, n_head=np.int32(2), n_embd=16))
    model.extend("yarn", np.float64(2), beta_fast=np.int64(16))
    model.save(tmp_path / "step-000000")
    config = GPT.load(tmp_path).config
    assert type(config.vocab_size) is int and config.vocab_size == 10
    assert config.extension["options"] == {"beta_fast": 16} and config.block_size == 512


def test_an_unknown_setting_of_a_file_is_refused():
    with pytest.raises(UserError, match=r"meta.json .*\(numbre\)"):
        validate.coerce(Settings, {"numbre": 1}, "meta.json")


def test_coerced_settings_equal_those_given_directly():
    config = GPTConfig(pos="alibi", window=8, layer_pattern="WWN", vocab_size=50)
    assert validate.coerce(GPTConfig, asdict(config), "meta.json") == config


# test_scripts.py has more, from the command line
@pytest.mark.parametrize(
    "config, name, value, allowed",
    [
        (GPTConfig, "n_layer", 0, "at least 1 and at most 4,096"),
        (GPTConfig, "n_embd", 2**24 + 1, "at most 16,777,216"),
        (GPTConfig, "block_size", 2**41, "at most"),
        (GPTConfig, "head_dim", 2**17, "at most 65,536"),
        (GPTConfig, "dropout", 1.0, "at least 0 and below 1"),
        (GPTConfig, "dropout", float("nan"), "at least 0 and below 1"),
        (GPTConfig, "norm_eps", 0.0, "above 0"),
        (GPTConfig, "attn_scale", float("inf"), "above 0"),
        (GPTConfig, "rope_base", 1.0, "above 1"),
        (GPTConfig, "window", -1, "at least 0"),
        (GPTConfig, "random_positions", 2**25, "at most 16,777,216"),
        (TrainConfig, "gradient_accumulation_steps", 2**20 + 1, "at most 1,048,576"),
        (TrainConfig, "beta2", 1.0, "below 1"),
        (ExtendConfig, "factor", 2e6, "at most 1,000,000"),
        (SampleConfig, "temperature", float("inf"), "at least 0"),
        (SampleConfig, "num_samples", 0, "at least 1"),
        (EvaluateConfig, "depths", 1001, "at most 1,000"),
    ],
)
def test_settings_have_ranges(config, name, value, allowed):
    with pytest.raises(UserError, match=f"^{name}={value} .*{allowed}"):
        validate.coerce(config, {name: value}, "meta.json")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"n_kv_head": 2}, "n_head=3 is not divisible by n_kv_head=2"),
        ({"n_layer": 4096, "n_embd": 2**22, "n_head": 64}, "more than 2\\^40 parameters"),
        ({"pos": "rope", "n_embd": 99}, "head_dim=33 is odd"),
        ({"pos": "nezha", "n_embd": 99}, "head_dim=33 is odd"),
        ({"pos": "xl", "n_embd": 99}, "n_embd=99 is odd"),
        ({"pos": "sinusoidal", "n_embd": 99}, "n_embd=99 is odd"),
        ({"pos": "rope", "rope_fraction": 0.3}, "rotates 19 of 64 channels"),
        ({"sinks": 4}, "give --window=N"),
        ({"layer_pattern": ""}, "letters F, W, N and S"),
        ({"layer_pattern": "f"}, "letters F, W, N and S"),
        ({"layer_pattern": "W"}, "do not fit.*: give --window=N"),
        ({"layer_pattern": "FS"}, "do not fit.*: give --window=N"),
        ({"layer_pattern": "FN", "window": 8}, "window=8 do not fit"),
        ({"layer_pattern": "FN", "pos": "sinusoidal"}, "--pos=sinusoidal acts in none"),
        ({"layer_pattern": "WS", "window": 8, "pos": "nope"}, "--pos=nope acts in none"),
        ({"pos": "nope", "random_positions": 999}, "--pos=nope does not"),
        ({"random_positions": 999, "window": 8}, "a window"),
        ({"n_embd": 100, "head_dim": 32}, None),
        ({"pos": "learned", "random_positions": 999}, None),
        ({"pos": "sinusoidal", "random_positions": 999}, None),
    ],
)
def test_models_that_cannot_be_are_refused(settings, words):
    config = validate.coerce(GPTConfig, settings, "x")
    if words is None:
        validate.check_model(config, POSITIONS)
        return
    with pytest.raises(UserError, match=words):
        validate.check_model(config, POSITIONS)


@pytest.mark.parametrize("pos", BUILT_IN)
def test_every_scheme_takes_the_layer_patterns_that_fit_it(pos):
    acts_in_attention = pos not in ("nope", "learned", "sinusoidal")
    patterns = [("F", 0), ("W", 8), ("WF", 8)]
    if acts_in_attention:
        patterns += [("FN", 0), ("FFN", 0), ("N", 0), ("WN", 8), ("WWS", 8), ("S", 8), ("FWNS", 8)]
    for pattern, window in patterns:
        config = GPTConfig(pos=pos, layer_pattern=pattern, window=window)
        validate.check_model(config, POSITIONS)
    assert validate.acts_in_attention(pos, POSITIONS) == acts_in_attention


def extension(**changes):
    return {"method": "yarn", "factor": 4.0, "options": {}, "original_length": 64} | changes


@pytest.mark.parametrize(
    "value",
    [
        {},
        extension(method=3),
        extension(factor="4"),
        extension(factor=True),
        extension(factor=0.5),
        extension(factor=float("nan")),
        extension(factor=1e13),
        extension(options=None),
        extension(original_length=0),
        extension(original_length=64.0),
        extension(original_length=257),
    ],
)
def test_a_damaged_extension_is_refused(value):
    validate.check_model(GPTConfig(extension=extension()), POSITIONS)
    with pytest.raises(UserError, match="the model's extension"):
        validate.check_model(GPTConfig(extension=value), POSITIONS)


def test_the_rules_hold_for_a_scheme_of_ones_own():
    """A scheme derived from one of ours, as the leaderboard takes it, meets the same rules."""

    class MyRoPE(POSITIONS["rope"]):
        pass

    positions = {**POSITIONS, "mine": MyRoPE}
    validate.check_model(GPTConfig(pos="mine", layer_pattern="FN"), positions)
    with pytest.raises(UserError, match="head_dim=33 is odd: --pos=mine"):
        validate.check_model(GPTConfig(pos="mine", n_embd=99), positions)
