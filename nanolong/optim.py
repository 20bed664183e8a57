"""The learning rate, and the optimizers: AdamW for all, or Muon for the blocks' matrices."""

import math

import torch

from kernels import torch_private
from nanolong.errors import UserError, require


def get_lr(cfg, step):
    """Return the learning rate of step 0, 1, ... Warmup is above 0, because 0 trains nothing."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    progress = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)  # 0 to 1
    if cfg.lr_schedule == "constant":
        decay = 0.0
    elif cfg.lr_schedule == "cosine":
        decay = (1 - math.cos(math.pi * min(progress, 1))) / 2
    else:  # trapezoid: constant, then linear over the last 40 %
        decay = min(1.0, max(0.0, (progress - 0.6) / 0.4))
    min_lr = min(cfg.min_lr, cfg.learning_rate)
    return cfg.learning_rate - (cfg.learning_rate - min_lr) * decay


def make_optimizers(model, cfg):
    """One or two optimizers whose groups hold every trained parameter exactly once.

    Norms, biases and a scheme's own parameters have no weight decay.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, embeddings, others = [], [], []
    for name, p in params.items():
        if name.startswith(("embed.", "head.")):
            embeddings.append(p)
        elif name.startswith("blocks.") and p.dim() == 2:
            matrices.append(p)
        else:
            others.append(p)
    use_muon = cfg.optimizer == "muon"
    groups = [
        {"params": embeddings if use_muon else embeddings + matrices},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,  # because training sets it before every step
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
        fused=all(p.device.type in ("cpu", "cuda") for p in params.values()),
    )
    if not use_muon:
        return [adamw]
    # Steps as large as AdamW's usually are (Liu et al. 2025, arXiv 2502.16982), because both have
    # one learning rate.
    torch_private.muon_in_float32()  # because a CPU multiplies bfloat16 slowly
    muon = torch.optim.Muon(
        matrices, lr=0.0, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [adamw, muon]


def take_step(optimizer):
    """Update the weights. Raises UserError if the step changed a value of param_groups, which are
    not saved, unless the optimizer also keeps it in its state.
    """
    before = group_values(optimizer)
    optimizer.step()
    kept = {name for state in optimizer.state.values() for name in state}
    for (_, name), text in sorted(group_values(optimizer).items() - before.items()):
        require(
            name in kept,
            f"{type(optimizer).__name__} sets {name}={text} in its param_groups, which checkpoints "
            f"do not hold: keep it in state[parameter][{name!r}], and read it from there",
        )


def group_values(optimizer):
    """Return the values of param_groups as text: (number of the group, name) -> text.

    Parameters and learning rates are left out, because training sets them.
    """
    values = {}
    for number, group in enumerate(optimizer.param_groups):
        for name in group.keys() - {"params", "lr"}:
            x = group[name]
            values[number, name] = str(x.tolist() if torch.is_tensor(x) else x)
    return values


def gradients(model):
    """The gradients of all trained parameters. Raises UserError for one that has none."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, grad in grads.items():
        if grad is None:
            raise UserError(
                f"{name} gets no gradient: use it in the forward pass, or remove it (a "
                "--layer_pattern of N and S alone uses no scheme: give --pos=nope)"
            )
    return list(grads.values())


def name_bad_gradient(model, norm):
    """Name the parameter whose gradient makes the norm infinite or NaN, or "" if several do."""
    if math.isfinite(norm):
        return ""
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.requires_grad}
    bad = [name for name, x in norms.items() if not x.isfinite()]
    return f" (of {bad[0]} alone)" if len(bad) == 1 else ""
