"""Compare a model of ours with transformers', both in float32, within a bound of time and memory.

The whole models compute a few tokens. The first layer of each kind alone computes positions beyond
the original context length, and more tokens than the window has.
"""

import contextlib
import copy
import functools
import re
import warnings
from dataclasses import replace

import torch
import transformers
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from nanolong import parallel
from nanolong.errors import UserError, require

N_TOKENS = 33  # for the comparison of whole models
N_FAR = 64  # tokens with gaps between their positions, and of which the logits are compared
MAX_POSITION = 1 << 16  # transformers' angles are float32, whose error grows with the position
MAX_TOKENS = 4096  # without gaps
# tensors that old files have, and models compute
REDUNDANT = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", module="transformers")


@contextlib.contextmanager
def as_user_error(source):
    """Turn errors of the libraries about a damaged file, of any kind, into a UserError.

    A KeyError and the like may be a bug of ours, against which no other file helps.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(source) in str(error) else f"{source}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "download it again, or choose another checkpoint"
        if isinstance(error, LookupError | AttributeError):
            remedy = "if the file is whole, please report it with its config.json"
        raise UserError(f"{source} cannot be used ({reason}): {remedy}") from None


def load_theirs(c, tensors):
    """Return transformers' model of a config and its tensors, by name, whose memory it shares.

    Raises UserError unless the model has all of its tensors, and these shapes.
    """
    tensors = {name: x for name, x in tensors.items() if not name.endswith(REDUNDANT)}
    # checked first: an absurd number of layers takes long to build even without memory
    require(
        c.num_hidden_layers <= len(tensors),
        f"its config.json says {c.num_hidden_layers} layers, and there are {len(tensors)} tensors: "
        "download both again",
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(c)
    shapes = {name: x.shape for name, x in tensors.items()}
    wrong = [name for name, p in empty.named_parameters() if shapes.get(name) != p.shape]
    # compared first, because absent tensors would take memory
    n_needed = sum(p.numel() for p in empty.parameters())
    n_stored = sum(x.numel() for x in tensors.values())
    require(
        n_needed <= n_stored,
        f"its config.json describes {n_needed:,} parameters and its files hold {n_stored:,} "
        f"({', '.join(wrong[:3])} missing, or of another shape): download both again",
    )
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in tensors.values()})
    options = {"dtype": torch.float32 if dtype == torch.float64 else dtype, "config": c}
    options |= {"state_dict": tensors, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are named below
    theirs, info = type(empty).from_pretrained(None, **options)
    # missing tensors became random weights
    wrong = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
    wrong = [name if isinstance(name, str) else name[0] for name in wrong]
    names = ", ".join(sorted(wrong)[:3])
    require(
        not wrong,
        f"the tensors do not fit config.json ({names} missing, too many, or of another shape): "
        "download both again",
    )
    return theirs.eval().requires_grad_(False)


@torch.no_grad()
def compare(model, theirs):
    """Compare our model with transformers'; return the compared lengths, and the differences.

    Raises UserError for logits that differ.
    """
    config = model.config
    tokens = torch.arange(min(N_TOKENS, config.block_size))
    passes = [(model, theirs, tokens)]
    kinds = [config.layer_kind(layer) for layer in range(config.n_layer)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    far = far_positions(config, has_window=False)
    # a long window hides no key at positions with gaps
    plans = [(first, 4 * MAX_POSITION if config.window else 0, far)]
    if config.window:
        # a short one shows which layers have it
        plans.append((range(config.n_layer), N_TOKENS // 2, tokens))
        plans.append((first, 0, far_positions(config, has_window=True)))
    for layers, window, positions in plans:
        small = cut_ours(model, layers, window), cut_theirs(theirs, layers, window)
        passes.append((*small, positions))
    report = []
    for ours, other, positions in tqdm(passes, "comparing logits", leave=False, disable=None):
        difference = largest_difference(ours, other, positions)
        what = f"{len(ours.blocks)} of {config.n_layer} layers, {len(positions)} tokens"
        report.append(f"{what} to position {int(positions[-1]) + 1}: {difference:.1e}")
    return report


def far_positions(config, has_window):
    """Return the positions that are compared: beyond the original length, if there are any."""
    end = min(2 * config.original_length, MAX_POSITION)
    if config.pos == "alibi":
        return torch.arange(min(config.block_size, MAX_TOKENS))
    if config.pos == "learned":
        end = config.block_size
    if has_window:
        n = min(config.window + N_FAR, MAX_TOKENS)
        return torch.arange(n) + max(0, end - n)
    chosen = torch.randperm(end, generator=torch.Generator().manual_seed(1))[:N_FAR]
    return torch.cat((chosen, torch.tensor([0, end - 1]))).unique()


def cut_ours(model, layers, window):
    """Return our model of some layers alone, which share its memory; window: 0 for its own."""
    config = model.config
    settings = {"n_layer": len(layers), "window": window or config.window}
    settings["layer_pattern"] = "".join(config.layer_kind(layer) for layer in layers)
    small = parallel.build_without_weights(type(model), replace(config, **settings))
    small.load_state_dict(cut_tensors(model.state_dict(), layers), assign=True)
    return small.eval().requires_grad_(False)


def cut_theirs(theirs, layers, window):
    """Return transformers' model of some layers alone, as cut_ours()."""
    c = copy.deepcopy(theirs.config)
    n_layer = c.num_hidden_layers
    for name, value in list(vars(c).items()):
        if isinstance(value, list) and len(value) == n_layer:
            setattr(c, name, [value[layer] for layer in layers])
    c.num_hidden_layers = len(layers)
    if window:
        c.sliding_window = window
    return load_theirs(c, cut_tensors(theirs.state_dict(), layers))


def cut_tensors(tensors, layers):
    """Return the tensors of some layers, numbered again, and the tensors outside of layers."""
    found = {}
    for name, x in tensors.items():
        match = re.match(r"((?:.*\.)?(?:layers|blocks|h)\.)(\d+)(\..*)", name)
        if match and int(match[2]) in layers:
            found[f"{match[1]}{layers.index(int(match[2]))}{match[3]}"] = x
        elif not match:
            found[name] = x
    return found


def largest_difference(ours, theirs, positions):
    """Return the largest difference of the last logits; UserError if it is too large."""
    n, end = len(positions), int(positions[-1]) + 1
    difference, largest = find_difference(ours, theirs, positions)
    require(
        difference <= 1e-6 * (100 + end) * max(1.0, largest),
        f"transformers computes other logits ({difference:.2g} apart of {largest:.2g}, on {n} "
        f"tokens to position {end}), so nothing was written: a setting, a scheme or an "
        "edit of model.py has no equivalent on the other side (if there is none, please report it)",
    )
    return difference


def find_difference(ours, theirs, positions):
    """Return the largest difference of the last logits, and the largest of our logits."""
    n, end = len(positions), int(positions[-1]) + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, (1, n), generator=generator)
    # without a mask a gap would be taken for the start of a document
    options = {"logits_to_keep": N_FAR, "use_cache": False, "attention_mask": tokens >= 0}
    if ours.config.pos != "alibi":
        options["position_ids"] = positions[None]
    with InFloat32(), warnings.catch_warnings():
        # a length beyond the context is meant here
        warnings.simplefilter("ignore")
        x = ours.hidden_states(tokens, None if end == n else positions)
        logits = ours.head(x[:, -N_FAR:])
        difference = (logits - theirs(tokens, **options).logits).abs().max().item()
    require(logits.isfinite().all(), "its logits are not finite: choose another checkpoint")
    return difference, logits.abs().max().item()


class InFloat32(TorchFunctionMode):
    """A context in which weights of fewer bits are float32 in each operation, one at a time."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*widen(args), **widen(kwargs or {}))


def widen(x):
    """Cast a tensor of fewer bits to float32, or all such tensors in a list, tuple or dict."""
    if isinstance(x, dict):
        return {name: widen(part) for name, part in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(widen, x))
    if not torch.is_tensor(x):
        return x
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
