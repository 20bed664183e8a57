"""The window schedule: attention in training is limited to a window that grows, step by step.

A short window makes early steps cheaper, and was found to train better models (SkyLadder,
2503.15450; modded-nanogpt's record of 2025-09-10 also rescales RoPE by YaRN at each change).
"""

import torch

from nanolong.validate import read_window_schedule, require


def window_at(cfg, step):
    """The window in tokens at a step: START, then cfg.window_changes changes up to END."""
    start, end = read_window_schedule(cfg.window_schedule)
    stage = min(step * cfg.window_changes // last_change(cfg), cfg.window_changes)
    return start + (end - start) * stage // cfg.window_changes


def last_change(cfg):
    """The step from which on the window is the final one."""
    # by default the 60 % before the learning rate of the trapezoid falls
    return cfg.window_steps or max(1, cfg.max_iters * 6 // 10)


def describe_schedule(cfg):
    """The window schedule, as "window: 8 to 64 tokens in 8 changes over 36 steps"."""
    start, end = read_window_schedule(cfg.window_schedule)
    yarn = ", RoPE rescaled by yarn" if cfg.window_yarn else ""
    changes = f"{cfg.window_changes} changes over {last_change(cfg)} steps"
    return f"window: {start} to {end} tokens in {changes}{yarn}"


def prepare_schedule(config, cfg):
    """Give a new model's GPTConfig the extension that --window_yarn leaves. Raises UserError."""
    if cfg.window_yarn:
        config.extension = yarn_extension(cfg)
    check_schedule(config, cfg)


def yarn_extension(cfg):
    start, end = read_window_schedule(cfg.window_schedule)
    return {"method": "yarn", "factor": end / start, "options": {}, "original_length": start}


def check_schedule(config, cfg):
    """Check the window schedule against a model. Raises UserError."""
    if not cfg.window_schedule:
        return
    _, end = read_window_schedule(cfg.window_schedule)
    lengths = {config.block_size, config.window} - {0}
    known = " or ".join(str(length) for length in sorted(lengths))
    schedule = f"window_schedule={cfg.window_schedule}"
    require(
        end in lengths,
        f"{schedule} ends at neither the model's window nor its context length: end at {known}",
    )
    require(
        not config.random_positions,
        f"random_positions={config.random_positions} and {schedule} contradict: leave one out",
    )
    if not cfg.window_yarn:
        return
    require(
        config.pos == "rope" and end == config.block_size,
        f"window_yarn=true extends rope to {config.block_size} tokens, not pos={config.pos} to "
        f"{end}: leave it out",
    )
    require(
        config.extension == yarn_extension(cfg),
        "window_yarn=true extends a new model in training, not an extended one: leave it out",
    )


def set_window(model, cfg, step=None):
    """Limit the layers whose window, or context, is at most END to the window of a step.

    step: None for the final window, which is that of validation and of the checkpoint.
    """
    if not cfg.window_schedule:
        return
    start, end = read_window_schedule(cfg.window_schedule)
    limit = end if step is None else window_at(cfg, step)
    config = model.config
    changed = False
    for layer, block in enumerate(model.blocks):
        own = config.window if config.uses_window(layer) else config.block_size
        window = min(own, limit) if own <= end else own
        if window == config.block_size and not config.uses_window(layer):
            window = 0  # the whole context
        changed |= window != block.attention.window
        block.attention.window = window
    if changed and cfg.window_yarn:
        for scheme in model.position_schemes():
            if "yarn" in scheme.methods:
                scheme.extend("yarn", limit / start)


def allow_compilations(model, cfg):
    """Let torch.compile compile the model, or each of its blocks, once for every window."""
    if cfg.window_schedule:
        config = torch._dynamo.config
        n = 4 * len(model.blocks) * (cfg.window_changes + 1)
        config.recompile_limit = max(config.recompile_limit, n)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, n)
