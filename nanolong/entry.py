"""Position schemes from files of the user: --entry=my_scheme.py adds the scheme my_scheme.

Such a file holds one class that derives from model.NoPE, and its imports. It is Python code and is
run, so it is only ever taken from the command line, never from a checkpoint.
"""

import difflib
import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path

import torch

from nanolong.errors import UserError, note, require

ROOT = Path(__file__).resolve().parent.parent
# files that training and evaluation execute
SOURCES = ("model.py", "rope_scaling.py", "train.py", "extend.py", "evaluate.py")
SOURCES += ("nanolong/**/*.py", "kernels/*.py", "data/*.py")

loaded = {}  # scheme class -> the text of its file


def load_entries(files, positions):
    """Add the schemes of these files to `positions`, POSITIONS of model.py. Returns their names."""
    return [load_entry(Path(file), positions) for file in files]


def load_entry(file, positions):
    """Add the scheme of a file, named like the file. Raises UserError for a file without one."""
    name = file.stem
    is_python = file.is_file() and file.suffix == ".py"
    require(is_python, f"--entry={file} is no Python file: give the path of one")
    source = file.read_text(encoding="utf-8")
    if name in positions:
        require(
            loaded.get(positions[name]) == source,
            f"--entry={file}: there is already a scheme {name!r}: rename the file, or leave it out",
        )
        return name
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    # Because torch.compile looks here for the functions of the file. No other module is lost.
    sys.modules.setdefault(name, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"--entry={file} cannot be imported ({reason}): fix the file, which has to import what "
            "it uses, as NoPE from model"
        ) from error
    classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name]
    schemes = [x for x in classes if issubclass(x, positions["nope"])]
    require(
        len(schemes) == 1,
        f"--entry={file} has {len(schemes)} classes that derive from model.NoPE: leave exactly one",
    )
    own, base = vars(schemes[0]), vars(positions["nope"])
    hooks = [hook for hook in base if not hook.startswith("_")]
    for attribute in own.keys() - {*hooks}:
        for hook in difflib.get_close_matches(attribute, hooks, 1, 0.75):
            # a number named base is not a misspelt bias()
            if callable(own[attribute]) == callable(base[hook]):
                note(f"--entry={file}: {attribute} is no hook: did you mean {hook}?")
    check_hooks(file, schemes[0], positions["nope"])
    positions[name] = schemes[0]
    loaded[schemes[0]] = source
    return name


def check_hooks(file, scheme, base):
    """Raise UserError if hooks of a scheme have other arguments than the base class has."""
    for hook, new in (("angles", "rotate"), ("gates", "bias")):
        problem = f"--entry={file}: the hook {hook}() went"
        require(hook not in vars(scheme), f"{problem}: override {new}(), see docs/develop.md")
    for hook in ("embed", "tables", "rotate", "bias", "attend"):
        own, expected = (
            ", ".join(
                name
                for name, x in inspect.signature(getattr(cls, hook)).parameters.items()
                if x.kind is x.POSITIONAL_OR_KEYWORD
            )
            for cls in (scheme, base)
        )
        problem = f"--entry={file}: {hook}() has the arguments ({own})"
        require(own == expected, f"{problem}: give it ({expected})")


def check_scheme(model):
    """Check the attributes and the hooks of a user's scheme. Raises UserError."""
    scheme, config = model.scheme, model.config
    if type(scheme) not in loaded or model.embed.weight.is_meta:
        return
    name = type(scheme).__name__
    if hasattr(scheme, "frequencies"):
        inv_freq, _ = scheme.frequencies(*scheme.scaling)
        require(
            torch.equal(inv_freq.to(scheme.inv_freq), scheme.inv_freq),
            f"{name} sets frequencies that extend() would replace: override frequencies() instead, "
            "as docs/develop.md shows",
        )
    H = config.n_head
    n = H + 3  # so that a table over distances never looks like slopes (H,)
    x = torch.zeros(1, n, config.n_embd)
    with torch.no_grad():
        bias = scheme.bias(x, 0, model.make_context(n))
    dtype = bias.dtype if torch.is_tensor(bias) else None
    shapes = [(H,), *((H, m) for m in range(1, n + 1))] if dtype == torch.float32 else []
    shapes += [(1, H, n)] if dtype in (torch.float32, torch.float64) else []
    found = f"{tuple(bias.shape)} in {bias.dtype}" if torch.is_tensor(bias) else f"{bias!r}"
    require(
        bias is None or (dtype is not None and bias.shape in shapes),
        f"{name}.bias(x, layer, context) must return None, slopes ({H},) or a table ({H}, m) in "
        f"float32 with m <= n, or sums (1, {H}, n) in float64: for n = {n} it returns {found}",
    )


def hash_sources(entry=()):
    """Hash the files of this project that a run executes, and the files of --entry: 16 digits."""
    files = [file for pattern in SOURCES for file in sorted(ROOT.glob(pattern))]
    digest = hashlib.sha256()
    for file in [*files, *map(Path, entry)]:
        digest.update(f"{file.name}: ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
