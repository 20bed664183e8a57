"""The command line: settings from flags and presets, --help, and what run_main makes of errors."""

import errno
import re
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from conftest import assert_refused, run_python

from data import prepare
from evaluate import EvaluateConfig
from experiments.run import RunConfig
from extend import ExtendConfig
from hf import HFConfig
from model import POSITIONS, GPTConfig
from nanolong import cli, validate
from nanolong.errors import LocalError, UserError
from sample import SampleConfig
from train import TrainConfig


@dataclass
class Base:
    # [shape]
    width: int = 4  # channels
    names: tuple[str, ...] = ("a", "b")  # of the channels
    # [speed]
    # a help text that is too long for the line of the field,
    # so it stands above
    rate: float = 0.5
    vocab_size: int = 3  # is hidden


@dataclass
class Derived(Base):
    rate: float = 0.25  # half as fast
    # [shape]
    depth: int | None = None  # layers; auto: as wide
    kind: Literal["round", "square"] = "round"  # outline
    silent: bool = False


@pytest.fixture(autouse=True)
def hide_vocab_size(monkeypatch):
    monkeypatch.setitem(cli.HIDDEN, "Base", ("vocab_size",))
    monkeypatch.setitem(cli.HIDDEN, "Derived", ("vocab_size",))


def parse(*argv, **options):
    classes = {"model_config": GPTConfig, "cfg": TrainConfig}
    return cli.parse(**classes, presets=True, argv=argv, **options)


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """A current folder with two presets."""
    (tmp_path / "a.toml").write_text("n_layer = 7\nlearning_rate = 1\ntie_embeddings = false\n")
    (tmp_path / "b.toml").write_text("n_layer = 8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -----------------------------------------------------------------------------
# Flags and presets.


def test_presets_stack_and_flags_win(presets):
    assert parse("a.toml", "b.toml").model_config.n_layer == 8
    assert parse("b.toml", "a.toml").model_config.n_layer == 7
    args = parse("--n_layer", "9", "a.toml", "b.toml", "--max_iters=1e3")
    config, cfg = args.model_config, args.cfg
    assert config.n_layer == 9
    assert config.tie_embeddings is False
    assert cfg.learning_rate == 1.0 and isinstance(cfg.learning_rate, float)
    assert cfg.max_iters == 1000 and isinstance(cfg.max_iters, int)
    assert args.given == {"n_layer", "learning_rate", "tie_embeddings", "max_iters"}
    assert args.flags == {"n_layer", "max_iters"}
    assert args.paths == []


def test_a_flag_alone_means_true():
    args = parse("--qk_norm=true", "--compile", "--bos", "false", "--seed", "3")
    cfg = args.cfg
    assert args.model_config.qk_norm == "head"  # as it was once
    assert cfg.compile is True
    assert cfg.bos is False
    assert cfg.seed == 3


def test_flags_may_have_dashes_and_are_given_once():
    config = parse("--n-layer=3", "--rope-base", "5e5").model_config
    assert (config.n_layer, config.rope_base) == (3, 500000.0)
    with pytest.raises(UserError, match="--n_layer is given twice"):
        parse("--n_layer=2", "--n-layer", "3")


def test_auto_is_a_value_where_a_setting_is_optional():
    args = parse("--compile=auto", "--layer_pattern=auto", "--dtype=auto")
    config, cfg = args.model_config, args.cfg
    assert cfg.compile is None
    assert config.layer_pattern == "F"
    assert cfg.dtype == "auto"
    assert args.given == {"compile", "layer_pattern", "dtype"}
    with pytest.raises(UserError, match="dtype must be one of"):
        parse("--dtype=none")


def test_defaults_replace_those_of_the_dataclass_and_flags_win():
    def defaults(given, paths):
        assert given == {"n_head": 1} and paths == []
        return {"n_head": 2, "n_layer": 6, "vocab_size": 99, "unknown": 0}

    args = parse("--n_head=1", defaults=defaults)
    config = args.model_config
    assert (config.n_head, config.n_layer, config.vocab_size) == (1, 6, GPTConfig.vocab_size)
    assert args.given == {"n_head"}


def test_defaults_are_checked_too():
    with pytest.raises(UserError, match="the earlier run has seed = None: seed must be"):
        parse(defaults=lambda given, paths: {"seed": None})
    with pytest.raises(UserError, match="n_layer=0 is out of range"):
        parse(defaults=lambda given, paths: {"n_layer": 0})


def test_paths_are_returned_in_order():
    args = cli.parse(cfg=Base, paths="folders", argv=["x", "--width=2", "y"])
    assert (args.cfg.width, args.given, args.paths) == (2, {"width"}, ["x", "y"])


def test_unlisted_settings_are_read(capsys):
    options = {"cfg": Base, "model_config": GPTConfig, "unlisted": ("model_config",)}
    args = cli.parse(**options, argv=["--n_layer=2"])
    assert isinstance(args.cfg, Base)
    assert (args.model_config.n_layer, args.given) == (2, {"n_layer"})
    with pytest.raises(SystemExit):
        cli.parse(**options, argv=["--help"])
    text = capsys.readouterr().out
    assert "--width" in text and "--n_layer" not in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--widht=1"], r"there is no setting 'widht' \(--widht=1\): did you mean 'width'\?"),
        (["--xyz=1"], r"there is no setting 'xyz' \(--xyz=1\): --help lists them all"),
        (["--vocab_size=3"], "there is no setting 'vocab_size'"),
        (["--width=four"], "--width=four: width must be a whole number"),
        (["--width"], "--width has no value: give one, as in --width=4"),
        (["--names"], "--names has no value: give one, as in --names=a,b"),
        (["--kind=oval"], "kind must be one of round, square"),
        (["--silent=perhaps"], "silent must be true or false"),
        (["width"], "'width' is not a setting: give --name=value; --help lists the settings"),
        (["a.toml"], "'a.toml' is not a setting"),
    ],
)
def test_what_the_command_line_does_not_take(words, message):
    with pytest.raises(UserError, match=message):
        cli.parse(cfg=Derived, argv=words)


# script -> wrong name = the setting that is meant, or nothing
MEANT = {
    "train.py": """
        lr=learning_rate context=block_size context-length=block_size ctx=block_size
        seq_len=block_size steps=max_iters iters=max_iters max_steps=max_iters position=pos
        positon=pos scheme=pos batch=batch_size out=out_dir schedule=lr_schedule
        layer_patern=layer_pattern n_layers=n_layer epochs= vocab_size= size=
    """,
    "extend.py": "context=factor length=factor steps=max_iters",
    "evaluate.py": "context=lengths length=lengths tokens=max_tokens lr= bos=",
    "sample.py": "length=max_new_tokens tokens=max_new_tokens prompt=start promt=start k=top_k",
    "data/prepare.py": "out=name",
}


@pytest.mark.parametrize(
    "script, pair", [(script, pair) for script in MEANT for pair in MEANT[script].split()]
)
def test_a_wrong_name_is_answered_by_the_setting_that_is_meant(script, pair, call):
    name, meant = pair.split("=")
    message = assert_refused(call(script, f"--{name}=x"))
    assert message.startswith(f"error: there is no setting {name.replace('-', '_')!r} (")
    assert message.endswith(f": did you mean {meant!r}?" if meant else ": --help lists them all")


def test_other_names_are_those_of_settings():
    classes = (GPTConfig, TrainConfig, ExtendConfig, EvaluateConfig, SampleConfig)
    known = set()
    for cls in (*classes, prepare.PrepareConfig):
        known |= {setting.name for setting in cli.settings_of(cls)}
    assert set(cli.OTHER_NAMES) <= known


@pytest.mark.parametrize(
    "text",
    [
        "n_layer = 'x'",
        "n_layer = 1.5",
        "n_layers = 3",
        "n_layer = ",
        "n_layer = true",
        "pos = 3",
        "[n_layer]\na = 1",
        "n_layer = " + "9" * 5000,
        "n_layer = " + "[" * 9000,
    ],
)
def test_a_bad_preset_is_named(text, presets):
    (presets / "c.toml").write_text(text)
    with pytest.raises(UserError, match="c.toml"):
        parse("c.toml")


def test_a_missing_preset_lists_those_that_there_are():
    with pytest.raises(UserError, match="no preset nothing.toml: config/ holds .*demo.toml"):
        parse("nothing.toml")


@pytest.mark.parametrize("preset", cli.preset_names())
def test_every_preset_of_the_project_is_valid(preset):
    extends = preset in ("finetune_public.toml", "smollm2_64k.toml", "llama3_128k.toml")
    classes = {"model_config": GPTConfig, "cfg": ExtendConfig if extends else TrainConfig}
    args = cli.parse(**classes, presets=True, argv=[preset])
    validate.check_model(args.model_config, POSITIONS)
    default = parse()
    assert (args.model_config, args.cfg) != (default.model_config, default.cfg)
    assert cli.parse(**classes, presets=True, argv=[f"config/{preset}"]) == args


def test_the_gpt2_presets_differ_in_the_architecture_only():
    args = parse("gpt2.toml")
    original_args = parse("gpt2_original.toml")
    assert args.cfg == original_args.cfg
    config, original = args.model_config, original_args.model_config
    architecture = (original.pos, original.norm, original.mlp, original.bias)
    assert architecture == ("learned", "layernorm", "gelu", "all")
    for name in ("n_layer", "n_head", "n_embd", "block_size"):
        assert getattr(config, name) == getattr(original, name)


# -----------------------------------------------------------------------------
# --help.


def test_help_has_a_group_and_a_line_for_each_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.parse(cfg=Derived, about="\nWhat it does.\n", paths="a folder", argv=["-h"])
    assert exit.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(" +", " ", line) for line in lines] == [
        "What it does.",
        "",
        "shape:",
        " --width=4 int channels",
        " --names=a,b list of the channels",
        " --depth=auto int layers; auto: as wide",
        " --kind=round choice round|square; outline",
        " --silent=false bool",
        "",
        "speed:",
        " --rate=0.25 float half as fast",
        "",
        "positional: a folder",
    ]


def test_help_may_stand_above_the_field():
    comment = "a help text that is too long for the line of the field, so it stands above"
    assert cli.field_comments(Base)["rate"] == ("speed", comment)


@pytest.mark.parametrize(
    "script, classes",
    [
        ("train.py", (GPTConfig, TrainConfig)),
        ("extend.py", (ExtendConfig,)),
        ("evaluate.py", (EvaluateConfig,)),
        ("sample.py", (SampleConfig,)),
        ("data/prepare.py", (prepare.PrepareConfig,)),
        ("hf.py", (HFConfig,)),
        ("experiments/run.py", (RunConfig,)),
    ],
)
def test_help_of_a_script_explains_every_setting(script, classes, call):
    done = call(script, "--help")
    assert done.returncode == 0 and not done.stderr
    assert max(map(len, done.stdout.splitlines())) <= cli.HELP_WIDTH
    for cls in classes:
        for setting in cli.settings_of(cls):
            line = rf"^  --{setting.name}=\S+ +\S+ +\S+"
            assert re.search(line, done.stdout, re.MULTILINE), setting.name
    if GPTConfig in classes:
        for name in cli.HIDDEN["GPTConfig"]:
            assert f"--{name}=" not in done.stdout


# -----------------------------------------------------------------------------
# run_main.


def run_main(raised, capfd, result=0):
    """cli.run_main of a main() that raises an error or returns; gives (status, stdout, stderr)."""

    def main():
        if raised is not None:
            raise raised
        return result

    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        cli.run_main(main)
    return exit.value.code, *capfd.readouterr()


@pytest.mark.parametrize("pos", ["alibi", "learned", "nope"])
@pytest.mark.parametrize("name", ["rope_base", "rope_fraction"])
def test_a_flag_of_another_scheme_is_refused(pos, name):
    with pytest.raises(UserError, match=f"--{name} is a setting of rope, and --pos={pos}"):
        validate.check_scheme_flags(pos, {name}, POSITIONS)


def test_schemes_of_the_user_may_read_any_setting():
    own = type("Own", (POSITIONS["nope"],), {"__module__": "own"})
    derived = type("Derived", (POSITIONS["rope"],), {})
    positions = {**POSITIONS, "own": own, "derived": derived}
    for pos in ("own", "derived", "rope"):
        validate.check_scheme_flags(pos, {"rope_base", "pos"}, positions)


@pytest.mark.parametrize(
    "error, message",
    [
        (UserError("x is wrong: choose y"), "x is wrong: choose y"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), "a.txt cannot be used"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file cannot be used (No space"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: "),
        (MemoryError(), "out of memory: "),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: "),
        (RuntimeError("Storage size calculation overflowed"), "out of memory: "),
    ],
)
def test_errors_of_the_user_or_the_machine_are_one_line(error, message, capfd):
    status, out, text = run_main(error, capfd)
    assert status == 2 and not out
    assert text.startswith(f"error: {message}") and text.count("\n") == 1


def test_a_bug_keeps_its_traceback(capfd):
    with pytest.raises(RuntimeError, match="shape mismatch"):
        cli.run_main(lambda: (_ for _ in ()).throw(RuntimeError("shape mismatch")))


def test_an_interrupt_while_a_script_imports_is_silent():
    done = run_python("from nanolong import python_version; raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "")
    done = run_python("from nanolong import python_version; raise ValueError('a bug')")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_the_status_of_main_is_the_exit_status(capfd, monkeypatch):
    for result in (0, 1, None):
        assert run_main(None, capfd, result) == (result, "", "")
    assert run_main(KeyboardInterrupt(), capfd) == (130, "", "")
    monkeypatch.setattr(cli, "discard_stdout", lambda: None)
    assert run_main(BrokenPipeError(errno.EPIPE, "Broken pipe"), capfd) == (0, "", "")


def test_of_several_processes_rank_0_prints_what_all_meet(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run_main(UserError("x"), capfd) == (2, "", "")
    assert run_main(LocalError("x"), capfd) == (2, "", "error: x\n")
    assert run_main(FileNotFoundError(errno.ENOENT, "gone", "a"), capfd)[2].startswith("error: a ")


def test_a_lost_process_ends_the_others_with_status_1():
    done = run_python(
        "import sys, torch\n"
        "from nanolong import cli\n"
        "def main():\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        "cli.run_main(main)\n"
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: process 0 has lost another process")


def test_a_terminal_that_knows_ascii_only_is_no_obstacle():
    code = "from nanolong import cli\ncli.run_main(lambda: print('caf\\u00e9'))\n"
    done = run_python(code, env={"PYTHONIOENCODING": "ascii:strict"})
    assert (done.returncode, done.stdout) == (0, "caf?\n")


def test_an_old_python_gets_one_line_before_anything_else_is_imported():
    """The check runs with a version that it takes for too old."""
    code = "import sys\nsys.version_info = (3, 9, 18)\nfrom nanolong import python_version\n"
    assert_refused(run_python(code), "3.11", "3.9")


def test_torchrun_ends_with_the_error_of_a_script(run, tmp_path):
    """Its traceback has no end but that of the first process, which is our sentence."""
    words = ["config/debug.toml", "--gradient_accumulation_steps=1", f"--out_dir={tmp_path}/run"]
    done = run("train.py", *words, processes=2)
    assert done.returncode == 1
    (line,) = re.findall("error: (gradient_accumulation_steps=1 .*multiple of 2.*)\n", done.stderr)
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "exitcode  : 2 " in cause and f"traceback : {line}\n" in cause
