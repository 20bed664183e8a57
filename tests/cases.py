"""One table of models, for the tests that hold for every scheme, kind of layer and extension.

A test with the argument `case` and the mark @pytest.mark.cases("some tags") runs on the rows that
have all of these tags (conftest.py). Whoever adds a scheme, a setting or a method adds a row. The
schemes of examples/schemes, and those of NANOLONG_ENTRY=FILE.py,..., are rows like the others.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import reference
import torch

from model import GPT, POSITIONS, GPTConfig
from nanolong.entry import load_entries
from rope_scaling import ATTENTION, METHODS, OPTIONS

EXAMPLES = sorted(Path(__file__).resolve().parent.parent.glob("examples/schemes/*.py"))
ENTRIES = [*EXAMPLES, *filter(None, os.environ.get("NANOLONG_ENTRY", "").split(","))]
SCHEMES = dict(POSITIONS)  # with those of the files; a test with a case has them in POSITIONS
OF_FILES = load_entries(map(Path, ENTRIES), SCHEMES)

SHAPE = {"n_layer": 2, "n_head": 6, "n_kv_head": 2, "head_dim": 8, "n_embd": 36}
SHAPE |= {"block_size": 24, "vocab_size": 50}


@dataclass(eq=False)
class Case:
    """A model with random weights, perhaps extended.

    n: tokens of a text, more than the context of 24 tokens if the scheme can go there.
    tags: words that the row is given, and those of `derived`, which follow from the scheme.
    """

    pos: str
    settings: dict = field(default_factory=dict)
    method: str = ""
    options: dict = field(default_factory=dict)
    tags: str = ""
    n: int = 37

    def __post_init__(self):
        self.scheme = SCHEMES[self.pos]
        self.n = 24 if self.scheme.bounded else self.n
        # The tables of such methods follow the length of the text.
        is_dynamic = "length" in OPTIONS.get(self.method, ()) or self.method == "dynamic-pi"
        counts = self.scheme.counts_indices() or self.method in ATTENTION
        derived = {
            "formulas": self.pos in POSITIONS or self.pos in reference.FILES,
            "own": self.pos not in POSITIONS and self.pos not in reference.FILES,
            "scheme": not (self.settings or self.method),
            "plain": not self.method,
            "extended": self.method,
            "fixed": not is_dynamic or "length" in self.options,
            "keys": self.pos != "linear_attention",  # whose cache is a state
            "gaps": not (counts or self.scheme.bounded or is_dynamic),
        }
        given = {*self.tags.split(), self.method}
        self.tags = given | {tag for tag, is_true in derived.items() if is_true}

    def __str__(self):
        long = ("long_factor", "short_factor")
        options = {name: x for name, x in self.options.items() if name not in long}
        words = [f"{name}={x}" for name, x in (self.settings | options).items()]
        return " ".join([self.pos, *filter(None, [self.method]), *words])

    def model(self, **settings):
        """The model, in evaluation mode: with the same weights each time."""
        torch.manual_seed(0)
        model = GPT(GPTConfig(pos=self.pos, **{**SHAPE, **self.settings, **settings}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                # all random, so that no term is hidden by a zero
                p.normal_(0, 1.0 if name.startswith("scheme.") else 0.3)
        if self.method:
            self.extend(model)
        return model.eval()

    def extend(self, model):
        """Extend a model twice: the layers stay those of the first time, the factors multiply."""
        first = "none" if self.pos == "rope" else self.method
        layers = {name: x for name, x in self.options.items() if name == "layers"}
        others = {name: x for name, x in self.options.items() if name != "layers"}
        model.extend(first, 1.4, **(layers if first == "none" else self.options))
        model.extend(self.method, 2.0, **others)
        assert model.config.block_size == 67  # 24 x 2.8
        assert model.config.original_length == 24


TABLES = {"long_factor": [1.0, 1.37, 1.74, 2.11], "short_factor": [1.0, 1.01, 1.02, 1.03]}
W = {"window": 6, "sinks": 2}
LOCAL = {**W, "layer_pattern": "WF", "rope_local_base": 300.0, "n_layer": 3}
GPT2 = {"norm": "layernorm", "mlp": "gelu", "bias": "all"}

CASES = [
    # Every scheme.
    Case("nope"),
    Case("learned"),
    Case("sinusoidal"),
    Case("shaw", tags="chunked"),
    Case("nezha"),
    Case("xl", tags="lora"),
    Case("t5"),
    Case("alibi"),
    Case("kerple", tags="chunked"),
    Case("kerple-power"),
    Case("sandwich"),
    Case("rope", tags="chunked"),
    Case("fox", tags="content"),
    Case("fox-rope", tags="content"),
    Case("selective_rope", tags="content"),
    Case("repo", tags="content"),
    Case("grape", tags="content"),
    *(Case(pos) for pos in OF_FILES if pos not in ("selective_rope", "repo", "grape")),
    # Every scheme in layers with a window.
    *(Case(pos, W) for pos in POSITIONS),
    # Every other setting of the model.
    Case("rope", {"norm_position": "post", "mlp": "geglu"}),
    Case("rope", {"norm_position": "both", "mlp": "gelu_exact"}),
    Case("learned", {**GPT2, "embed_scale": 2.5}, tags="bfloat16 lora"),
    Case("rope", {**GPT2, "norm_position": "parallel", "rope_fraction": 0.5}, tags="kernels"),
    Case("rope", {"qk_norm": "head", "tie_embeddings": False, "bias": "qkv"}, tags="bfloat16"),
    Case("rope", {"qk_norm": "all", "attn_scale": 0.7, "p_rope": 0.5}),
    Case("rope", {"rope_fraction": 0.0}),
    Case("rope", {"output_gate": "head", "norm_position": "parallel"}),
    Case("rope", {"output_gate": "channel", "sink_scores": True, **W}, tags="lora"),
    Case("fox", {"output_gate": "channel"}, tags="lora"),
    Case("shaw", {"output_gate": "head"}),
    Case("rope", LOCAL),
    Case("rope", {**W, "layer_pattern": "SFN", "n_layer": 3}, tags="traced"),
    Case("fox-rope", {"window": 6, "n_layer": 1}, tags="compile"),
    Case("rope", {"norm_eps": 0.1}),
    Case("t5", {"sink_scores": True}, tags="lora"),
    Case("rope", {"query_scale": "logn"}),
    Case("rope", {"query_scale": "logn:3", **W}, tags="traced"),
    Case("rope", {"query_scale": "llama4", **W}, tags="traced"),
    Case("rope", {"query_scale": "logn@nope", "layer_pattern": "FN"}),
    Case("nope", {"query_scale": "llama4:4:0.3:1"}),
    # Every method of extension.
    Case("nope", {}, "scale", {"scale": 1.3}),
    Case("learned", {}, "pi"),
    Case("sinusoidal", {}, "pi"),
    Case("shaw", {}, "pi"),
    Case("nezha", {}, "pi"),
    Case("xl", {}, "pi"),
    Case("xl", W, "clamp"),
    Case("t5", {}, "pi"),
    Case("alibi", {}, "pi"),
    Case("alibi", {}, "dynamic-pi"),
    Case("kerple", {}, "pi"),
    Case("kerple-power", {}, "pi"),
    Case("sandwich", {}, "pi"),
    Case("fox-rope", {}, "dynamic-yarn"),
    *(Case("rope", {}, method) for method in METHODS if method not in ("longrope", *ATTENTION)),
    Case("rope", {}, "longrope", TABLES),
    Case("rope", {}, "jet-long", n=100),  # whose tables change three times
    Case("rope", {}, "jet-long", {"length": 70.0}),
    Case("rope", {}, "jet-long", {"window": 1}, n=60),
    Case("rope", {}, "self-extend", tags="steps", n=60),
    Case("rope", {}, "self-extend", {"window": 5, "group": 3}),
    Case("rope", {}, "self-extend", {"window": 24, "group": 7}, n=60),
    Case("rope", {}, "self-extend", {"window": 1}),
    Case("rope", {}, "lm-infinite", n=60),
    Case("rope", {}, "lm-infinite", {"sinks": 0}),
    Case("rope", {}, "lm-infinite", {"sinks": 15}),
    Case("rope", W, "ntk"),
    Case("rope", W, "dynamic-ntk"),
    *(Case("rope", LOCAL, method, {"layers": "all"}) for method in ("pi", "yarn", "dynamic-ntk")),
    Case("rope", {**W, "layer_pattern": "FW"}, "yarn"),
    Case("rope", {**W, "layer_pattern": "FW"}, "dynamic-ntk"),
    Case("rope", {"p_rope": 0.5}, "yarn"),
    Case("rope", {"head_dim": 10, "rope_fraction": 0.6}, "dynamic-yarn"),
    Case("rope", {}, "dynamic-ntk", {"length": 48.0}),  # does not follow the text
    Case("rope", {"query_scale": "logn"}, "dynamic-ntk"),
    Case("rope", {"sink_scores": True}, "drope", {"scale": 1.3}),
    # RoPE of examples/schemes.
    *(Case("p_rope", {}, method) for method in ("pi", "dynamic-yarn")),
    *(Case("two_bases", {**W, "layer_pattern": "WF"}, m) for m in ("", "pi", "dynamic-ntk")),
    Case("ssmax", W),
    Case("ssmax", W, "pi"),
]


def select(tags=""):
    """The rows that have all of these tags."""
    return [case for case in CASES if case.tags.issuperset(tags.split())]
