"""What a checkpoint costs at a context length: prefill, decoding, and the KV cache."""

import time
from functools import partial
from itertools import product

import torch

from nanolong import devices
from nanolong.errors import require
from nanolong.evaluation.log import Cell
from nanolong.evaluation.loss import evaluation_mode

N_DECODED = 32


def plan_costs(models, cfg):
    """Return a Cell for every checkpoint and length."""
    cells = []
    for (name, model), length in product(models.items(), cfg.lengths):
        record = {"checkpoint": name, "task": "cost", "length": length}
        cells.append(Cell([record], partial(measure_cost, record, model, cfg.dtype)))
    return cells


def measure_cost(record, model, dtype):
    """Return a record with the seconds of a prefill of `length` tokens, the faster of two, the
    tokens per second of decoding up to that length, and the megabytes of keys and values there.
    """
    length = record["length"]
    require(length >= 4, f"a text of {length} tokens costs too little to measure: lengthen it")
    n_decoded = min(N_DECODED, length // 2)
    device = next(model.parameters()).device
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator())
    tokens = tokens.to(device)
    with evaluation_mode(model, devices.pick_dtype(dtype, device)):
        # the second finds memory and code warm
        prefills = [time_pass(model, tokens, model.cache_class(length), device) for _ in range(2)]
        # decoding ends at the length, which a bounded scheme cannot exceed
        cache = model.cache_class(length)
        time_pass(model, tokens[:, :-n_decoded], cache, device)
        last = tokens[:, -n_decoded:].split(1, 1)
        # the first step fills caches for the others
        steps = [time_pass(model, token, cache, device) for token in last][1:]
    n_bytes = sum(x.nbytes for x in (*cache.kept.values(), *cache.last.values()))
    found = {"prefill_seconds": min(prefills), "tokens_per_second": len(steps) / sum(steps)}
    return [{**record, **found, "cache_megabytes": n_bytes / 1e6}]


def time_pass(model, tokens, cache, device):
    """Return the seconds of a forward pass up to the logits of the last token."""
    devices.synchronize(device)
    start = time.perf_counter()
    model.head(model.hidden_states(tokens, cache=cache)[:, -1])
    devices.synchronize(device)
    return time.perf_counter() - start
