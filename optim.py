"""The learning rate of an update, and the optimizers: AdamW for all, or Muon for the blocks' matrices. cfg is a TrainConfig."""
import math

import torch


def learning_rate(cfg, step):
    """The rate of update number `step`, counted from 0."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    done = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)  # 0..1
    fall = {"constant": 0.0, "cosine": (1 - math.cos(math.pi * min(done, 1))) / 2, "trapezoid": min(1.0, max(0.0, (done - 0.6) / 0.4))}[cfg.lr_schedule]
    return cfg.learning_rate - (cfg.learning_rate - min(cfg.min_lr, cfg.learning_rate)) * fall


def make_optimizers(model, cfg):
    """One or two optimizers whose groups hold every parameter exactly once. Gains, and a scheme's own parameters, are not decayed."""
    names = dict(model.named_parameters())
    matrices = [p for n, p in names.items() if n.startswith("blocks.") and p.dim() == 2]
    embeddings = [p for n, p in names.items() if n.startswith(("embed.", "head."))]
    rest = [p for n, p in names.items() if p.dim() < 2 or n.startswith("pos.")]
    muon = cfg.optimizer == "muon"
    groups = [{"params": embeddings if muon else embeddings + matrices}, {"params": rest, "weight_decay": 0.0}]
    fused = all(p.device.type in ("cpu", "cuda") for p in names.values())
    optimizers = [torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay, fused=fused)]
    if muon:
        optimizers.append(torch.optim.Muon(matrices, lr=0.0, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"))
    held = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(held) == sorted(map(id, names.values())), "every parameter belongs to exactly one group"
    return optimizers
