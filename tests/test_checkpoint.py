"""Checkpoints are whole or absent, load to the bit, and are refused when they are damaged."""

import errno
import json
import os
import shutil

import pytest
import torch
from conftest import TINY, assert_refused, assert_success
from safetensors.torch import load_file, save_file

import model as model_file
from model import GPT
from nanolong import cli, tensor_file
from nanolong.errors import UserError
from nanolong.optim import make_optimizers
from nanolong.run import checkpoint
from nanolong.run.checkpoint import (
    find_checkpoint,
    load_optimizers,
    optimizer_tensors,
    read_meta,
    save_model,
    settings_record,
    write_meta,
)
from nanolong.run.folder import list_steps
from train import TrainConfig


@pytest.fixture
def run_folder(make, tmp_path):
    """A run folder with checkpoints of steps 5 and 10."""
    model = make(pos="t5")
    folder = tmp_path / "run"
    save_model(model, folder / "step-000005", step=5)
    save_model(model, folder / "step-000010", step=10, val_loss=2.0)
    return folder


def step_names(folder):
    return [step.name for step in list_steps(folder)]


# -----------------------------------------------------------------------------
# Saving and loading.


def test_a_saved_model_loads_to_the_bit(run_folder, make):
    model = make(pos="t5")
    loaded = GPT.load(run_folder)
    assert loaded.config == model.config
    assert not loaded.training
    for p, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, expected)


def test_the_newest_checkpoint_is_loaded_or_the_one_that_is_named(run_folder):
    newest = GPT.load(run_folder)
    assert newest.folder == run_folder / "step-000010"
    assert newest.meta["val_loss"] == 2.0 and "config" not in newest.meta
    assert GPT.load(run_folder / "step-000005").meta["step"] == 5


@pytest.mark.parametrize("best, step", [([2, 1.0], 2), (None, 4)])
def test_the_best_checkpoint_has_the_lowest_validation_loss(best, step, make, tmp_path):
    """The newest says which it is; where none was evaluated, the newest is the best."""
    for number in (1, 2, 4):
        save_model(make(), tmp_path / f"step-{number:06d}", step=number, best=best)
    assert GPT.load(tmp_path, best=True).meta["step"] == step
    assert GPT.load(tmp_path).meta["step"] == 4


@pytest.mark.parametrize("pos", ["rope", "t5", "learned"])
def test_weights_can_be_stored_and_loaded_in_bfloat16(pos, make, tmp_path):
    """Rounded as torch rounds; in memory norms and position schemes stay float32."""
    model = make(pos=pos, qk_norm=True, bias="all")
    save_model(model, tmp_path / "step-000000", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "step-000000/model.safetensors")
    rounded = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    assert stored.keys() == rounded.keys()
    assert all(stored[name].equal(rounded[name]) for name in rounded)

    loaded = {
        torch.float32: GPT.load(tmp_path),
        None: GPT.load(tmp_path, dtype=None),
        torch.bfloat16: GPT.load(tmp_path, dtype=torch.bfloat16),
    }
    for dtype, again in loaded.items():
        assert again.stored_dtype == torch.bfloat16
        assert again.head.weight is again.embed.weight
        for name, p in again.named_parameters():
            matrix = "norm" not in name and not name.startswith("pos.")
            expected = dtype or torch.bfloat16 if matrix else torch.float32
            assert (p.dtype, p.requires_grad) == (expected, True), name
            assert p.float().equal(rounded[name].float())
    # by default in float32, whatever the dtype of the model
    model.bfloat16().save(tmp_path / "wide" / "step-000000")
    again = GPT.load(tmp_path / "wide", dtype=None)
    for name, p in again.named_parameters():
        assert p.dtype == torch.float32 and p.equal(rounded[name].float())


def test_what_is_no_parameter_is_built_as_ever(run_folder, monkeypatch):
    """A buffer that someone adds to the model has memory and values after loading."""
    init = model_file.Attention.__init__

    def with_buffer(self, config, layer):
        init(self, config, layer)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    monkeypatch.setattr(model_file.Attention, "__init__", with_buffer)
    assert GPT.load(run_folder).blocks[1].attention.mask.tolist() == [1, 1, 1]


def test_a_loaded_model_keeps_its_meta_when_it_is_saved_again(run_folder, tmp_path):
    model = GPT.load(run_folder)
    model.save(tmp_path / "copy")
    meta = read_meta(tmp_path / "copy")
    assert meta["step"] == 10
    assert meta["val_loss"] == 2.0
    save_model(model, tmp_path / "later", step=11)
    assert read_meta(tmp_path / "later")["step"] == 11


# -----------------------------------------------------------------------------
# Whole or absent.


def test_an_existing_folder_is_not_overwritten(run_folder, make):
    before = (run_folder / "step-000005/meta.json").read_bytes()
    with pytest.raises(UserError, match="step-000005 exists already: remove it"):
        make().save(run_folder / "step-000005")
    assert (run_folder / "step-000005/meta.json").read_bytes() == before


def test_a_full_disk_is_named_with_what_is_needed_and_what_is_whole(
    run_folder, make, monkeypatch, tmp_path
):
    """While the weights are written, the second tensor does not fit; a new folder is not left."""
    written = []

    def tensor_bytes(tensor):
        written.append(tensor)
        if len(written) % 2 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return b""

    monkeypatch.setattr(tensor_file, "tensor_bytes", tensor_bytes)
    model = make()
    with pytest.raises(OSError) as raised:
        model.save(run_folder / "step-000015")
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    message = cli.describe_os_error(raised.value)
    assert str(run_folder / "step-000015") in message
    assert f"it takes {n_bytes / 1e6:,.1f} MB" in message
    assert f"{run_folder}/step-000010 is whole" in message
    assert sorted(folder.name for folder in run_folder.iterdir()) == ["step-000005", "step-000010"]
    with pytest.raises(OSError, match="No space left .*new/step-000000"):
        model.save(tmp_path / "new" / "step-000000")
    assert list(tmp_path.iterdir()) == [run_folder]


def test_what_an_interrupted_save_has_left_is_replaced(run_folder, make):
    leftover = run_folder / ".tmp-step-000015"
    leftover.mkdir()
    (leftover / "optim.safetensors").write_bytes(b"half")
    make().save(run_folder / "step-000015")
    assert not leftover.exists()
    assert not (run_folder / "step-000015/optim.safetensors").exists()


def test_a_folder_without_meta_json_is_no_checkpoint(run_folder):
    (run_folder / "step-000010/meta.json").unlink()
    assert step_names(run_folder) == ["step-000005"]
    assert GPT.load(run_folder).meta["step"] == 5


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint in .*: give a run folder"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match="does not exist; train one with python train.py"):
        GPT.load(tmp_path / "nothing")


def test_a_step_that_is_gone_names_those_that_are_there(run_folder):
    with pytest.raises(UserError, match="no .*: the steps in .* are step-000005, "):
        find_checkpoint(run_folder / "step-000011")


# -----------------------------------------------------------------------------
# Damaged weights.


def with_bit(content, position):
    """Change one bit of the byte at a position."""
    changed = bytearray(content)
    changed[position] ^= 1
    return changed


DAMAGES = {
    "cut off": lambda content: content[:-3],
    "another header": lambda content: with_bit(content, 60),
    "another weight": lambda content: with_bit(content, -9),
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_damaged_weights_are_refused_with_the_checkpoint_before_them(damage, run_folder):
    file = run_folder / "step-000010/model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(DAMAGES[damage](content))
    message = "missing: " if damage == "missing" else ""
    with pytest.raises(UserError, match=f"{message}use the one before it, .*step-000005"):
        GPT.load(run_folder)
    shutil.rmtree(run_folder / "step-000005")
    with pytest.raises(UserError, match="no earlier checkpoint is left, so train again"):
        GPT.load(run_folder)


def replace_weights(folder, tensors):
    """Replace a checkpoint's weights, with a matching checksum in meta.json."""
    save_file(tensors, folder / "model.safetensors")
    meta = read_meta(folder)
    meta["checksums"]["model.safetensors"] = checkpoint.sha256(folder / "model.safetensors")
    write_meta(folder, meta)


def test_weights_of_another_shape_name_or_dtype_are_refused(run_folder):
    folder = run_folder / "step-000010"
    weights = load_file(folder / "model.safetensors")
    for name, tensor, message in (
        ("norm.weight", torch.zeros(31), r"norm.weight is \(31,\) where \(32,\) is expected"),
        ("extra", torch.zeros(1), r"extra is \(1,\) where nothing is expected"),
        ("norm.weight", torch.zeros(32).half(), "holds F16 and F32 tensors, and a"),
    ):
        replace_weights(folder, {**weights, name: tensor})
        with pytest.raises(UserError, match=message):
            GPT.load(run_folder)
    replace_weights(folder, {name: tensor.half() for name, tensor in weights.items()})
    with pytest.raises(UserError, match="holds F16 tensors"):
        GPT.load(run_folder)
    del weights["norm.weight"]
    replace_weights(folder, weights)
    with pytest.raises(UserError, match="norm.weight is absent"):
        GPT.load(run_folder)


# -----------------------------------------------------------------------------
# Damaged meta.json.


@pytest.mark.parametrize(
    "text", ["", '{"format": 2', "{}", "[]", "3", '{"format": 2}', "[" * 10**5]
)
def test_a_meta_json_that_is_none_is_refused(text, run_folder):
    (run_folder / "step-000010/meta.json").write_text(text)
    with pytest.raises(UserError, match=r"meta.json is damaged .*step-000005"):
        GPT.load(run_folder)


def test_an_edited_meta_json_and_another_format_are_refused(run_folder):
    file = run_folder / "step-000010/meta.json"
    text = file.read_text()
    file.write_text(text.replace('"val_loss": 2.0', '"val_loss": 1.0'))
    with pytest.raises(UserError, match="it was edited or cut off"):
        GPT.load(run_folder)
    for version in (1, 99, "two"):
        file.write_text(json.dumps({**json.loads(text), "format": version}))
        with pytest.raises(UserError, match=f"has format {version!r}, and this version reads 2"):
            GPT.load(run_folder)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"n_layer": 3}, "does not fit its meta.json: blocks.2"),
        ({"n_layer": "two"}, "n_layer must be a whole number"),
        ({"n_layer": 0}, "n_layer=0 is out of range"),
        ({"pos": "quantum"}, "trained with --pos=quantum, which this checkout lacks: use"),
        ({"pos": ["t5"]}, "pos must be text"),
        ({"pos": "shaw"}, "does not fit its meta.json: pos"),
        ({"n_embd": 10**6}, "does not fit its meta.json: embed.weight"),
        ({"n_head": 3}, "n_head=3"),
        ({"drop_out": 0.0}, "has drop_out=0.0, which this checkout has no setting for"),
        ({"extension": {"method": "pi"}}, "the model's extension to"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(settings, message, run_folder):
    """Even where meta.json's own checksum is right."""
    folder = run_folder / "step-000010"
    meta = read_meta(folder)
    meta["config"].update(settings)
    write_meta(folder, meta)
    with pytest.raises(UserError, match=message):
        GPT.load(run_folder)


def test_settings_of_other_branches_do_not_bar_a_checkpoint(run_folder):
    """One that stood at its default is left out; one that is new takes this checkout's default."""
    folder = run_folder / "step-000010"
    meta = read_meta(folder)
    assert "rope_base" in meta["config_defaults"] and "n_embd" not in meta["config_defaults"]
    tokens = torch.arange(10)[None]
    expected = GPT.load(folder)(tokens)
    meta["config"]["rope_p"] = 1.0
    meta["config_defaults"].append("rope_p")
    for name in ("sinks", "attn_scale"):
        del meta["config"][name]
        meta["config_defaults"].remove(name)
    write_meta(folder, meta)
    model = GPT.load(folder)
    assert torch.equal(model(tokens), expected) and model.config.attn_scale == 1.0
    model.save(run_folder / "again")
    assert "rope_p" not in read_meta(run_folder / "again")["config"]

    meta["config_defaults"].remove("rope_p")
    meta["config"]["rope_p"] = 0.75
    write_meta(folder, meta)
    with pytest.raises(UserError, match="has rope_p=0.75, which this checkout has no setting for"):
        GPT.load(folder)


def test_an_extension_method_that_the_checkout_lacks_is_no_damage(run_folder):
    folder = run_folder / "step-000010"
    meta = read_meta(folder)
    extension = {"method": "mixed", "factor": 2.0, "options": {}, "original_length": 12}
    meta["config"]["extension"] = extension
    write_meta(folder, meta)
    with pytest.raises(UserError, match="by method 'mixed', which this checkout lacks"):
        GPT.load(folder)


def test_a_default_that_stands_for_another_setting_counts_as_default(make):
    """n_kv_head = 0 is n_head, and is saved as that number."""
    record = settings_record("config", make().config)
    assert record["config"]["n_kv_head"] == 4 and record["config"]["layer_pattern"] == "F"
    derived = {"n_kv_head", "head_dim", "mlp_dim", "layer_pattern"}
    assert derived <= set(record["config_defaults"])
    record = settings_record("config", make(n_kv_head=2, window=4, layer_pattern="FW").config)
    assert not {"n_kv_head", "layer_pattern", "window"} & set(record["config_defaults"])


def test_the_training_settings_of_another_branch(call, text_data, tmp_path):
    run = tmp_path / "run"
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={run}"]
    assert_success(call(*words))
    folder = list_steps(run)[-1]
    meta = read_meta(folder)
    meta["train"]["swing"] = 3
    write_meta(folder, meta)
    resume = ["train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=10"]
    assert_refused(call(*resume), "has swing=3")
    meta["train_defaults"].append("swing")
    write_meta(folder, meta)
    assert_success(call(*resume))


TRAIN = {"dataset": "data/x", "learning_rate": 0.1, "batch_size": 1}
TRAIN["gradient_accumulation_steps"] = 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("config", 3),
        ("checksums", {}),
        ("step", -1),
        ("step", 1.5),
        ("tokens", "many"),
        ("pretraining_tokens", True),
        ("bos", 2**60),
        ("bos", 50),  # outside the vocabulary
        ("dataset", 3),
        ("data_hash", []),
        ("parent", {}),
        ("launch", 1),
        ("val_loss", "low"),
        ("val_loss", True),
        ("tokenizer", "bytes"),
        ("best", [1]),
        ("best", [1, None]),
        ("best", [-1, 2.0]),
        ("scaler", [0.0, 1]),
        ("scaler", 3),
        ("train", {"dataset": "data/x"}),
        ("train", {**TRAIN, "dataset": None}),
        ("train", {**TRAIN, "learning_rate": -1.0}),
        ("train", {**TRAIN, "batch_size": 0}),
        ("train", {**TRAIN, "gradient_accumulation_steps": "4"}),
    ],
)
def test_values_of_a_wrong_type_in_meta_json_are_refused(key, value, run_folder):
    folder = run_folder / "step-000010"
    meta = {**read_meta(folder), key: value}
    write_meta(folder, meta)
    with pytest.raises(UserError, match="meta.json is damaged .*step-000005"):
        GPT.load(run_folder)


def test_values_of_the_right_type_in_meta_json_are_read_back(run_folder):
    folder = run_folder / "step-000010"
    values = {
        **{"step": 3, "tokens": 10**9, "bos": 49, "tokenizer": {"kind": "bytes"}},
        **{"best": [2, 1.5], "scaler": [65536.0, 7], "parent": "out/x", "train": TRAIN},
    }
    write_meta(folder, {**read_meta(folder), **values})
    meta = GPT.load(run_folder).meta
    assert {key: meta[key] for key in values} == values


# -----------------------------------------------------------------------------
# Optimizers.


@pytest.fixture
def make_trained(make):
    """A function that makes a model and its optimizers after two steps: (model, optimizers)."""

    def make_trained(name):
        model = make()
        optimizers = make_optimizers(model, TrainConfig(optimizer=name))
        tokens = torch.randint(0, 50, (2, 20))
        for _ in range(2):
            model(tokens, tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model, optimizers

    return make_trained


@pytest.mark.parametrize(
    "change, message",
    [
        ({"extra.exp_avg": torch.zeros(1)}, "holds extra.exp_avg"),
        ({"norm.weight.exp_avg": torch.zeros(31)}, "holds norm.weight.exp_avg"),
        ({"norm.weight.exp_avg": torch.zeros(32).double()}, "holds norm.weight.exp_avg"),
        ({"norm.weight.step": None}, "lacks norm.weight.step"),
    ],
    ids=["extra", "shape", "dtype", "missing"],
)
def test_optimizer_tensors_that_do_not_fit_are_refused(change, message, make_trained, tmp_path):
    model, optimizers = make_trained("adamw")
    tensors = {**optimizer_tensors(model, optimizers), **change}
    file = tmp_path / "optim.safetensors"
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=f"{message}, which is not what this optimizer keeps"):
        load_optimizers(model, optimizers, file)


def test_the_state_of_another_optimizer_or_a_part_of_it_is_refused(make_trained, tmp_path):
    model, optimizers = make_trained("adamw")
    file = tmp_path / "optim.safetensors"
    save_file(optimizer_tensors(model, optimizers), file)
    muon = make_optimizers(model, TrainConfig(optimizer="muon"))
    with pytest.raises(UserError, match="resume with the optimizer that the run was started with"):
        load_optimizers(model, muon, file)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_optimizers(model, optimizers, file)
