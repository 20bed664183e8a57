"""The learning rate, and the optimizers: AdamW for all, or Muon for the blocks' matrices."""

import math

import torch

from kernels import torch_private
from nanolong import devices, parallel
from nanolong.errors import UserError


def get_lr(cfg, step):
    """The learning rate of a step, counted from 0. cfg: a TrainConfig."""
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
        lr=0.0,  # set at every step
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
        fused=all(p.device.type in ("cpu", "cuda") for p in params.values()),
    )
    if not use_muon:
        return [adamw]
    # as --dtype=auto: without native bfloat16 its products can take twice float32's time and more
    has_bfloat16 = devices.pick_dtype("auto", matrices[0].device) == torch.bfloat16
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    return [adamw, Muon(matrices, cfg.weight_decay, dtype)]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): each step of a matrix is its momentum, orthogonalized.

    Steps are as large as AdamW's usually are (Liu et al. 2025, arXiv 2502.16982), so that one
    learning rate fits both optimizers. In bfloat16 it computes torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", but all matrices of a shape at once.
    """

    def __init__(self, matrices, weight_decay, dtype, momentum=0.95):
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype  # of the orthogonalization

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for (rows, columns), matrices in by_shape.items():
                updates = torch.stack([self.accumulate(p, group["momentum"]) for p in matrices])
                updates = orthogonalize(updates.to(self.dtype)).to(matrices[0].dtype)
                step_size = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
                torch_private.multiply_each(matrices, 1 - group["lr"] * group["weight_decay"])
                torch_private.add_to_each(matrices, updates.unbind(), -step_size)

    def accumulate(self, p, decay):
        """Take in the gradient of a matrix; returns the mean that looks ahead (Nesterov)."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        mean = state["momentum_buffer"].lerp_(p.grad, 1 - decay)
        return p.grad.lerp(mean, decay)


def orthogonalize(x):
    """Bring the singular values of matrices (N, m, n) near 1, between about 0.7 and 1.2.

    Five Newton-Schulz iterations with the polynomial of Jordan et al. (2024), which is steep at 0.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        # a x + (b gram + c gram^2) x
        gram = x @ x.mT
        product = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, product, x, beta=3.4445)
    return x.mT if is_tall else x


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
    """Say which parameter's gradient makes their norm not finite, if it is one alone: or ""."""
    if math.isfinite(norm):
        return ""
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.requires_grad}
    # a sharded one knows its part alone
    bad = [name for name, x in norms.items() if not parallel.whole(x).isfinite()]
    return f" (of {bad[0]} alone)" if len(bad) == 1 else ""
