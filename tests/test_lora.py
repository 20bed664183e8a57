"""LoRA: updates of low rank are those of float64 arithmetic, and checkpoints have them merged."""

import copy
import functools
import shutil

import pytest
import torch
from conftest import SMALLEST, assert_refused, assert_same_bits, assert_success, logged, newest

import data
import train
from model import GPT
from nanolong import lora, optim
from nanolong.run import save_model

MODES = ["0 --compile=true", "0 --checkpoint_activations=true", "2 --dtype=float32"]
SCALE = 5.0 / 3  # alpha 5, rank 3
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-11)


def updates_of(model):
    """Name of a matrix -> (W, A, B)."""
    names = [f"blocks.{i}.attention.{name}" for i in (0, 1) for name in "qkvo"]
    parts = {name: model.get_submodule(name).parametrizations.weight for name in names}
    return {f"{name}.weight": (x.original, x[0].A, x[0].B) for name, x in parts.items()}


def merge(plain, updates, x, y):
    """A model without LoRA that has the matrices W + scale B A, and its gradients by name."""
    merged = copy.deepcopy(plain)
    matrices = {name: W + SCALE * B @ A for name, (W, A, B) in updates.items()}
    merged.load_state_dict({**plain.state_dict(), **matrices})
    with torch.enable_grad():
        merged(x, y).backward()
    return merged, {name: p.grad for name, p in merged.named_parameters()}


@pytest.mark.cases("lora")
@pytest.mark.parametrize("also", ["", "norms", "norms embeddings"])
def test_loss_and_gradients_are_those_of_the_merged_matrices(case, also):
    """dA = scale B^T dW and dB = scale dW A^T, with the dW of a model without LoRA."""
    plain = case.model().double().train()
    model = copy.deepcopy(plain)
    lora.add_updates(model, 3, 5.0, also.split())
    for _, A, B in updates_of(model).values():
        bound = A.shape[1] ** -0.5  # of a uniform distribution
        assert 0.9 * bound < A.abs().max() < bound and A.mean().abs() < 0.2 * bound
        assert not B.any()
        torch.nn.init.normal_(B, 0, 0.3)
    x, y = torch.randint(50, (2, 2, 24))
    model(x, y).backward()
    merged, wanted = merge(plain, updates_of(model), x, y)
    assert_close(model.weights(), merged.weights())
    for name, (W, A, B) in updates_of(model).items():
        dW = wanted.pop(name)
        assert W.grad is None
        assert_close((A.grad, B.grad), (SCALE * B.T @ dW, SCALE * dW @ A.T))
    for name, grad in wanted.items():
        is_norm = name.split(".")[-2].endswith("norm") and "norms" in also
        is_embedding = name.startswith(("embed.", "scheme.")) and "embeddings" in also
        assert_close(model.get_parameter(name).grad, grad if is_norm or is_embedding else None)
    with torch.no_grad():
        assert_close(model.eval()(x), merged.eval()(x))
    with torch.autocast("cpu", torch.bfloat16):  # which would round a product of A and B
        found, wanted = model.float().weights(), merged.float().weights()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_training_is_adamw_on_the_factors(make, text_data, tmp_path):
    """In float64, with weight decay, and clipped by the norm of the gradients of the factors."""
    settings = {**SMALLEST, "dataset": str(text_data), "out_dir": str(tmp_path / "run")}
    cfg = train.TrainConfig(weight_decay=0.3, grad_clip=0.02, **settings)
    plain = make(vocab_size=257).double()
    model = copy.deepcopy(plain)
    lora.add_updates(model, 3, 5.0)
    updates = copy.deepcopy(updates_of(model))
    factors = [x for _, A, B in updates.values() for x in (A, B)]
    adamw = torch.optim.AdamW(factors, betas=(0.9, 0.95), weight_decay=0.3)
    dataset = data.open_dataset(str(text_data), None)
    for step in range(cfg.max_iters):
        x, y = map(torch.from_numpy, dataset.batch(2 * step, 2, 24, cfg.seed, 0)[:2])
        _, dW = merge(plain, updates, x, y)
        for name, (_, A, B) in updates.items():
            A.grad, B.grad = SCALE * B.T @ dW[name], SCALE * dW[name] @ A.T
        assert torch.nn.utils.clip_grad_norm_(factors, 0.02) > 0.02
        adamw.param_groups[0]["lr"] = optim.get_lr(cfg, step)
        adamw.step()
    with torch.enable_grad():
        train.train(model, cfg)
    assert_close(list(updates_of(model).values()), list(updates.values()))
    of_file = train.estimate_loss(GPT.load(cfg.out_dir).double(), dataset, cfg)["val_loss"]
    assert of_file == pytest.approx(logged(cfg.out_dir, "val_loss")[-1], abs=1e-7)


@pytest.fixture
def words(save_run, text_data):
    """The words that extend a run with weights in bfloat16, trained by Muon as it says."""
    trained = {**vars(train.TrainConfig()), **SMALLEST, "optimizer": "muon", "batch_size": 4}
    trained |= {"dataset": str(text_data), "learning_rate": 0.01}
    model = GPT.load(save_run("float32", {"train": trained}, n_kv_head=2))
    run = model.folder.parent.with_name("rope")
    save_model(model, run / "step-000001", torch.bfloat16)
    words = ["extend.py", run, "--device=cpu", "--lora=3", "--lora_alpha=5", "--lora_also=norms"]
    # few tokens, because products in bfloat16 are slow on a CPU
    words += ["--max_iters=4", "--eval_interval=2", "--eval_iters=1", "--max_tokens=96"]
    return [*words, "--factor=2", "--batch_size=1"]


def test_a_run_is_resumed_to_the_same_bits_and_every_checkpoint_is_merged(words, call, tmp_path):
    words += ["--dtype=bfloat16"]
    once, run, stage = (tmp_path / name for name in ("once", "run", "stage"))
    for folder in (once, run):
        assert_success(call(*words, f"--out_dir={folder}"))
    shutil.rmtree(newest(run))
    resume = [*words, f"--out_dir={run}", "--init_from=resume"]
    assert_refused(call(*resume, "--lora=4"), "made with lora=3, not 4", "leave --lora out")
    assert_success(call(*resume))
    assert_same_bits(run, once)
    # the next stage goes on with the same factors
    keep = ["--factor=1", "--max_iters=5", "--keep_optimizer=true", "--device=cpu"]
    keep += ["--eval_iters=1", "--max_tokens=96"]
    assert_success(call("extend.py", once, *keep, f"--out_dir={stage}"))
    before, after, last = (GPT.load(folder).state_dict() for folder in (words[1], once, stage))
    for name, weight in before.items():
        is_trained = ".attention." in name or "norm" in name
        assert torch.equal(weight, after[name]) != is_trained, name
        assert torch.equal(after[name], last[name]) != is_trained, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_same_updates(mode, words, run, tmp_path):
    words += ["--gradient_accumulation_steps=2", "--batch_size=2"]
    one, other = tmp_path / "one", tmp_path / "other"
    assert_success(run(*words, f"--out_dir={one}"))
    processes, *changed = mode.split()
    assert_success(run(*words, *changed, f"--out_dir={other}", processes=int(processes)))
    for name in ("loss", "val_loss", "norm"):
        assert logged(other, name) == pytest.approx(logged(one, name), abs=1e-4), name
    found, wanted = (GPT.load(folder).state_dict() for folder in (other, one))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
