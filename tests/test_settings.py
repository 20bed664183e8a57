"""Settings from flags and presets, --help, and what run_main makes of errors."""

import errno
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import pytest
import torch
from conftest import assert_refused, run_python

import train
from extend import ExtendConfig
from model import GPTConfig
from nanolong import errors, settings
from nanolong.errors import LocalError, UserError
from train import TrainConfig


@dataclass
class Shape:
    # [shape]
    width: int = 4  # channels
    names: tuple[str, ...] = ("a", "b")
    depth: int | None = None
    kind: Literal["round", "square"] = "round"
    rate: float = 0.5
    silent: bool = False
    texts: Sequence[str] = ()
    sizes: tuple[int, ...] = ()
    kinds: tuple[Literal["round", "square"], ...] = ()


def parse(*argv, **options):
    return settings.parse(shape=Shape, argv=argv, **options)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("--width=1e3", "width", 1000),
        ("--width=9007199254740991", "width", 2**53 - 1),
        ("--names=x,y", "names", ("x", "y")),
        ("--names=", "names", ()),
        ("--depth=auto", "depth", None),
        ("--rate=2", "rate", 2.0),
        ("--silent=no", "silent", False),
    ],
)
def test_text_becomes_the_type_of_the_setting(word, name, value):
    found = getattr(parse(word).shape, name)
    assert found == value and type(found) is type(value)


def test_values_may_follow_their_name_and_the_last_one_wins():
    args = parse("--width", "5", "--silent", "a", "--rate=1", "--rate", "2", paths="names")
    assert (args.shape.width, args.shape.silent, args.shape.rate) == (5, True, 2.0)
    assert args.paths == ["a"] and args.given == {"width", "silent", "rate"}
    assert parse("--silent", "false").shape.silent is False
    # text of which there may be several is whole
    assert parse("--texts=a, b", "--texts", "c").shape.texts == ("a, b", "c")


def test_presets_stack_flags_win_and_defaults_come_last(tmp_path):
    (tmp_path / "a.toml").write_text("width = 7\nrate = 1\nnames = ['x']\n")
    (tmp_path / "b.toml").write_text("width = 8\n")
    files = [str(tmp_path / name) for name in ("a.toml", "b.toml")]

    def defaults(given, paths):
        assert given == {"width": 8, "rate": 1.0, "names": ("x",), "kind": "square"}
        return {"rate": 9, "depth": 2, "unknown": 1}

    args = parse(*files, "--kind=square", defaults=defaults)
    assert args.shape == Shape(8, ("x",), 2, "square", 1.0)
    assert args.given == {"width", "rate", "names", "kind"}
    assert parse(*reversed(files)).shape.width == 7
    assert parse("--width=9", *files).shape.width == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--widht=1", "unknown setting --widht .*did you mean --width"),
        ("--width=2.5", "width must be a whole number"),
        ("--width=8k", "width must be a whole number .* not 8k"),
        ("--sizes=8k", "sizes must be a whole number .* not 8k.* as in --sizes=1,2,3"),
        ("--width=-1", "from 0 on"),
        ("--width=9007199254740992", "below 2\\^53"),
        ("--silent=perhaps", "true or false"),
        ("--kind=oval", "unknown --kind 'oval': choose from round, square"),
        ("--sizes=1,two", "'two' in --sizes=1,two: sizes must be .* as in --sizes=1,2,3"),
        (
            "--kinds=round,oval",
            "unknown --kinds 'oval'.* round, square, .* as in --kinds=round,squ",
        ),
        ("--width", "--width has no value"),
        ("--width --silent", "--width has no value"),
    ],
)
def test_what_is_no_setting_or_value_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse(*words.split())


def test_a_bad_preset_is_named(tmp_path):
    for text in ("width = ", "width = 'x'", "colour = 1"):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(UserError, match="bad.toml"):
            parse(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize("preset", settings.preset_names())
def test_every_preset_of_the_project_is_valid(preset):
    extends = preset in ("finetune_public.toml", "smollm2_64k.toml")
    classes = {"model_config": GPTConfig, "cfg": ExtendConfig if extends else TrainConfig}
    args = settings.parse(**classes, argv=[preset])
    assert settings.parse(**classes, argv=[f"config/{preset}"]) == args
    assert (args.model_config, args.cfg) != (GPTConfig(), classes["cfg"]())


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("train.py", {"TrainConfig": "train", "GPTConfig": "model"}),
        ("extend.py", {"ExtendConfig": "extend"}),
        ("evaluate.py", {"EvaluateConfig": "evaluate"}),
        ("sample.py", {"SampleConfig": "sample"}),
        ("hf.py", {"HFConfig": "hf"}),
        ("data/prepare.py", {"PrepareConfig": "data.prepare"}),
        ("experiments/run.py", {"RunConfig": "experiments.run"}),
    ],
)
def test_help_has_a_line_for_each_setting_with_its_default_and_comment(script, names, call):
    text = call(script, "--help-all").stdout
    for name, module in names.items():
        cls = getattr(importlib.import_module(module), name)
        assert max(map(len, settings.help_of([cls]).splitlines())) <= 110
        for field in fields(cls):
            found = re.search(rf"^  --{field.name}=(\S+)\s+\S+", text, re.MULTILINE)
            assert bool(found) == (f"{name}.{field.name}" not in settings.HIDDEN), field.name
            if found:
                assert found[1] == settings.format_value(field.default)


@pytest.mark.parametrize(
    ("script", "fitting", "others"),
    [
        ("train.py", ["gpt2.toml", "styles/olmo3.toml"], ["finetune_public.toml"]),
        ("extend.py", ["finetune_public.toml"], ["gpt2.toml", "or a run or checkpoint folder"]),
        ("sample.py", [], ["presets:"]),
    ],
)
def test_help_names_the_presets_that_fit(script, fitting, others, call):
    text = call(script, "--help").stdout
    assert all(word in text for word in fitting)
    first = set(train.FIRST.split()) if script == "train.py" else set()
    assert first <= set(re.findall(r"^  --(\w+)=", text, re.MULTILINE))
    assert not any(word in text for word in others)


# -----------------------------------------------------------------------------
# run_main.


def run_main(raised, capfd):
    """errors.run_main of a main() that raises an error: (status, stdout, stderr)."""

    def main():
        raise raised

    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        errors.run_main(main)
    return exit.value.code, *capfd.readouterr()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("x is wrong: choose y"), "x is wrong: choose y"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), "a.txt cannot be used, for"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: in training lower --batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: "),
    ],
)
def test_errors_of_the_user_or_the_machine_are_one_line(error, message, capfd):
    status, out, text = run_main(error, capfd)
    assert status == 2 and not out
    assert text.startswith(f"error: {message}") and text.count("\n") == 1


def test_bugs_keep_their_traceback_and_interrupts_are_silent(capfd, monkeypatch):
    with pytest.raises(RuntimeError, match="shape mismatch"):
        errors.run_main(lambda: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    assert run_main(KeyboardInterrupt(), capfd) == (130, "", "")
    monkeypatch.setattr(errors, "discard_stdout", lambda: None)
    assert run_main(BrokenPipeError(errno.EPIPE, "Broken pipe"), capfd) == (0, "", "")


def test_of_several_processes_the_first_prints_what_all_meet(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    assert run_main(UserError("x"), capfd) == (2, "", "")
    assert run_main(LocalError("x"), capfd) == (2, "", "error: x\n")
    assert run_main(FileExistsError(errno.EEXIST, "there", "a"), capfd)[2].startswith("error: a ")


def test_an_old_python_and_a_terminal_of_ascii_are_answered():
    code = "import sys\nsys.version_info = (3, 9, 18)\nfrom nanolong import settings\n"
    assert_refused(run_python(code), "3.11", "3.9")
    code = "from nanolong import errors\nerrors.run_main(lambda: print('caf\\u00e9'))\n"
    done = run_python(code, env={"PYTHONIOENCODING": "ascii:strict"})
    assert (done.returncode, done.stdout) == (0, "caf?\n")
