"""Optimizers as somebody might add them, put in the place of torch.optim.AdamW by tests."""

import torch


class Averaging(torch.optim.AdamW):
    """AdamW that also keeps an average of the weights, a sum of row norms, and a count."""

    @torch.no_grad()
    def step(self):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            norms = p.norm(dim=-1)
            state.setdefault("ema", p.clone()).lerp_(p, 0.1)
            state.setdefault("norms", torch.zeros_like(norms)).add_(norms)
            state.setdefault("count", torch.zeros(1, dtype=torch.int64)).add_(1)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), whose steps fade by numbers of its own, which are not tensors."""

    def __init__(self, groups, lr, weight_decay, **ignored):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                state["count"] = state.get("count", 0) + 1
                state["fade"] = state.get("fade", 0.1) / (1 + 0.1 * state["count"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(mean.lerp(p.grad, 0.1).sign(), alpha=group["lr"] * state["fade"])
                mean.lerp_(p.grad, 0.01)


class Counting(torch.optim.AdamW):
    """AdamW with a count of its steps in param_groups, as schedule-free AdamW has."""

    keeps = False  # whether its state has the count, too

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"] if self.keeps else ():
                self.state[p]["k"] = self.state[p].get("k", 0) + 1
            group["k"] = group.get("k", 0) + 1
