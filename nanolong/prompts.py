"""Prompts of sample.py: read, encoded and checked, and how far the first forward pass is."""

import math
import shlex
import sys
import time
from pathlib import Path

from data import encode_prompt
from nanolong import chat
from nanolong.errors import UserError, note

# A prompt that takes longer than so many seconds is reported: then, after twice as long, and so on.
SLOW_PROMPT = 5


def read_prompt(start):
    """Return the prompt as text; bytes that are not UTF-8 become surrogate escapes."""
    if not start.startswith("FILE:"):
        return start
    file = start.removeprefix("FILE:")
    try:
        return Path(file).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        reason = f"the prompt {file!r} cannot be read ({error.strerror})"
        raise UserError(f"{reason}: give --start=FILE:PATH of a text file") from None


def encode_start(cfg, tokenizer, bos):
    """Return the token ids of the prompt, what to print of it, and the ids that end the text."""
    start = read_prompt(cfg.start)
    if cfg.chat:
        ids, stop = chat.encode_chat(tokenizer, start, cfg.system)
        return ids, "", stop
    note_special_tokens(start, tokenizer)
    printable = start.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return encode_prompt(tokenizer, bos, start), printable, set()


def note_special_tokens(start, tokenizer):
    """Print a note if a prompt has the text of a special token, which is plain text there."""
    found = [text for text in tokenizer.special_tokens if text in start]
    if found:
        advice = ""
        if chat.find_template(tokenizer) is not None:
            advice = "; for the model's chat format give the message alone, and --chat"
        note(f"{found[0]!r} in the prompt is encoded as plain text, not as a special token{advice}")


def check_length(model, folder, prompt_length, max_new_tokens):
    """Print a note if the text will exceed the context length; refuse an absurd prompt."""
    config = model.config
    context = config.max_positions
    if prompt_length > 64 * context:
        raise UserError(
            f"the prompt has {prompt_length} tokens, more than 64 times the context length of "
            f"{context}: shorten it, or extend the model by extend.py"
        )
    total = prompt_length + max_new_tokens
    if total <= context or model.pos.bounded:  # generate() refuses where a scheme is bounded
        return
    advice = ""
    if config.pos == "rope" and not config.random_positions:
        factor = math.ceil(total / config.block_size)
        path = shlex.quote(str(folder))
        advice = f"; to extend it: python extend.py {path} --method=yarn --factor={factor}"
    note(f"{total} tokens are more than the context length of {context}{advice}")


def show_prefill(model, n_tokens):
    """Print on stderr how far the next forward pass, which computes the prompt, is if it is slow.

    All layers take about as long, whatever the scheme: those that are done say when it will end.
    """
    n_layers = len(model.blocks)
    done = 0
    start = time.perf_counter()
    next_line = start + SLOW_PROMPT

    def finish_layer(block, args, output):
        nonlocal done, next_line
        done += 1
        now = time.perf_counter()
        if done < n_layers and now >= next_line:
            next_line = now + (now - start)
            left = (now - start) / done * (n_layers - done)
            layers = f"{done} of {n_layers} layers"
            print(
                f"prompt of {n_tokens} tokens: {layers}, about {left:.0f} s left", file=sys.stderr
            )
        if done == n_layers:
            for hook in hooks:
                hook.remove()
            # A version for every length: no keys can be cached.
            versions = {model.pos.set_length(n_tokens + i) for i in range(3)}
            if now - start >= SLOW_PROMPT and len(versions) == 3:
                note(
                    f"every new token computes the whole text again, about {now - start:.0f} s "
                    "each: lower --max_new_tokens, or extend by another method"
                )

    hooks = [block.register_forward_hook(finish_layer) for block in model.blocks]
