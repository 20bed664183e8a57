"""Small tokenizers, datasets and GGUF files, made by the tokenizers and the gguf package.

interchange.py makes the models. What is right comes from these packages, from transformers, and
from plain code here.
"""

import functools
import json

import gguf
import tokenizers
import torch
from conftest import ROOT
from interchange import LENGTH, make_theirs

from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, empty_bpe
from nanolong.tokenizer_files import make_tokenizer

# -----------------------------------------------------------------------------
# Texts

# Words, code, many scripts, composed and decomposed characters, joined emoji, and every kind of
# white space. No digit follows a white space: transformers splits SmolLM's otherwise.
HARD_TEXT = (
    "The quick brown fox can't jump(3.14159) times over lazy dogs' backs; it'll TRY, WON'T it?"
    "\n\n\tdef f(x, *, y=None):\n        return {'a': [x**2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café e\u0301; Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文字符, "
    "日本語の, 한국어. 🙂👩\u200d👩\u200d👧 x   \u00a0\u3000aaaaaaa     \n   \n<b>&amp;</b> "
)
DIGITS = "in 2024,  12 x\n   3 ½ Ⅻ ١٢٣ 1234567 0x1F"
HARD_TEXTS = (
    "",
    " ",
    "a",
    " leading and  double   spaces    ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "e\u0301 \u1e9b\u0323 क्षि ซึ้ง Z̸̡̘a̷l̵g̶o",
    "中文字符，日本語のテキスト。한국어",
    "null \0 and \x01\x1f\x7f control",
    "\t\tdef f(x):\r\n\r\n        return x\n\n\n",
    "<|begin|><|end|> <|3|><s></s><unk> <s>a</s> [INST]",
    "\ufeff\u200b\u2028\u00a0\u3000\u2581\uffff\U0010ffff",
    DIGITS,
    HARD_TEXT,
)

# -----------------------------------------------------------------------------
# Tokenizers

# kind of a tokenizer.json -> GGUF's name of how it splits text
PRE_TOKENIZER = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen": "qwen2", "smollm2": "smollm"}
BYTE_LEVEL = tuple(PRE_TOKENIZER)
SENTENCEPIECE = ("llama2", "metaspace")
KINDS = (*BYTE_LEVEL, *SENTENCEPIECE)
VOCAB_SIZE = 700
PADDED_VOCAB_SIZE = 707  # the model's


def training_lines():
    text = "".join(path.read_text()[:8000] for path in sorted(ROOT.glob("*.py")))
    return (text + (HARD_TEXT + DIGITS) * 3).splitlines(True)


def byte_characters():
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(special, vocab_size=0, kind="gpt2", left_out=(), first=None):
    """Byte-level BPE that the package trains, whose first tokens are the special ones.

    vocab_size: 0 for the bytes alone. kind: one of BYTE_LEVEL, or None for text that is not split.
    left_out: bytes that it lacks. first: the token that is put before every text.
    """
    plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = empty_bpe(PRE_TOKENIZERS[PRE_TOKENIZER[kind or "gpt2"]])
    made.pre_tokenizer = made.pre_tokenizer if kind else plain
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=[c for byte, c in byte_characters().items() if byte not in left_out],
        max_token_length=12,
        show_progress=False,
    )
    made.train_from_iterator(training_lines() if vocab_size else [], trainer)
    if first:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, made.token_to_id(first))]
        )
    return made


def sentencepiece(kind):
    """Train a tokenizer.json such as Llama's: a space is U+2581, rare characters are bytes."""
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    model = tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    trained = tokenizers.Tokenizer(model)
    marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    trained.normalizer = normalizers.Sequence(marks)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*special, *fallback],
        limit_alphabet=90,
        show_progress=False,
    )
    trained.train_from_iterator(training_lines(), trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = spec["added_tokens"][: len(special)]
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    if kind == "metaspace":
        made.normalizer = None
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    return made


@functools.cache
def train(kind):
    """A tokenizer of the shape that one of KINDS has."""
    if kind in SENTENCEPIECE:
        return sentencepiece(kind)
    if kind == "smollm2":  # without some bytes that UTF-8 has not, or that are controls
        left_out = {*range(0x01, 0x09), 0xC0, 0xC1, *range(0xF5, 0x100)}
        return byte_level([f"<|{i}|>" for i in range(17)], VOCAB_SIZE, kind, left_out)
    first = "<|begin|>" if kind == "llama3" else None
    return byte_level(["<|begin|>", "<|end|>"], VOCAB_SIZE, kind, first=first)


@functools.cache
def import_tokenizer(kind):
    """train(), imported for a model of a padded vocabulary."""
    files = {"tokenizer.json": train(kind).to_str().encode()}
    ids = {"config.json": {"bos_token_id": 1, "eos_token_id": 2}}
    return make_tokenizer(files, ids, PADDED_VOCAB_SIZE)[0]


def write_tokenizer(folder, tokenizer, **files):
    """Write a tokenizer.json and other files, name without .json -> content; return the folder."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# -----------------------------------------------------------------------------
# GGUF files, as llama.cpp's converter writes them


@functools.cache
def gguf_vocabulary(name):
    """The metadata of a small vocabulary, the special tokens first, as SmolLM has them."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # so coarse that the splitting decides which of the merges are made
    tokenizer = byte_level([*special, "<think>"], 900, None)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        # the last: what a converter writes for an id that the tokenizer does not have
        "tokenizer.ggml.tokens": [*tokens, f"[PAD{len(tokens)}]"],
        "tokenizer.ggml.token_type": [3] * len(special) + [4] + [1] * (len(tokens) - 4) + [5],
        "tokenizer.ggml.merges": [
            " ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for message in messages %}\u00e4{% endfor %}",
    }


F32 = gguf.GGMLQuantizationType.F32
# Rows are multiples of 32, of which Q8_0 makes blocks.
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": LENGTH // 2}
YARN_OPTIONS = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
# name -> model_type, quantisation, RoPE, and what its config has other than SHAPE
GGUFS = {
    "llama": ("llama", "F32", {}, {}),
    "llama-f16-no-gqa": ("llama", "F16", {}, {"num_key_value_heads": 4}),
    "llama-q8-linear": ("llama", "Q8_0", LINEAR, {}),
    "llama-yarn": ("llama", "Q8_0", YARN, {}),
    "llama-llama3": ("llama", "F32", LLAMA3, {"max_position_embeddings": 1 << 16}),
    "mistral-window": ("mistral", "BF16", {}, {"sliding_window": 21}),
    "qwen2": ("qwen2", "F32", {}, {}),
    "qwen2-q4-yarn": ("qwen2", "Q4_1", YARN_OPTIONS, {}),
    "qwen3-q8-wide-heads": ("qwen3", "Q8_0", {}, {"head_dim": 128, "tie_word_embeddings": False}),
    "ernie4_5": ("ernie4_5", "Q8_0", LINEAR, {}),
    "smollm3": ("smollm3", "Q5_0", {}, {"num_hidden_layers": 6, "no_rope_layers": None}),
}


def interleaved(tensor, n_heads):
    """The rows of q or k as llama.cpp's converter orders them: LlamaModel.permute()."""
    parts = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
    return parts.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def write_metadata(writer, c):
    """What llama.cpp's converter writes of a config."""
    writer.add_type("model")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    if writer.arch in ("llama", "smollm3"):
        writer.add_rope_dimension_count(c.head_dim)
    if c.model_type == "mistral" and c.sliding_window:
        writer.add_sliding_window(c.sliding_window)
    rope = c.rope_parameters
    rope_type = rope["rope_type"]
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope_type == "yarn" and "beta_slow" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def write_gguf(file, name="llama", edit=None, rope=None):
    """Write one of GGUFS, and return transformers' model of the weights that the file has.

    edit: a function that changes (writer, tensors by their names in the file) before they are
    written. rope: what edit changes of the RoPE.
    """
    model_type, quantisation, own_rope, changes = GGUFS[name]
    arch = "llama" if model_type == "mistral" else model_type
    rope = {"rope_type": "default", "rope_theta": 1e4, **own_rope, **(rope or {})}
    options = {**SHAPE, "rope_parameters": rope, **changes}
    theirs = make_theirs(model_type, "default", len(name), **options)
    c = theirs.config
    writer = gguf.GGUFWriter(file, arch)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    write_metadata(writer, c)
    tensors = {}
    for hf_name, p in theirs.named_parameters():
        kind = gguf.GGMLQuantizationType[quantisation if p.dim() == 2 else "F32"]
        rows = torch.arange(len(p))
        is_query = hf_name.split(".")[-2] in ("q_proj", "k_proj")
        if is_query and arch in ("llama", "smollm3"):
            rows = interleaved(rows, len(p) // c.head_dim)
        data = gguf.quants.quantize(p[rows].numpy(), kind)
        p[rows] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        tensors[names.get_name(hf_name, (".weight", ".bias"))] = (data, kind)
    if rope["rope_type"] == "llama3":  # what divides RoPE's frequencies
        plain = rope["rope_theta"] ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        table = plain / theirs.model.rotary_emb.inv_freq
        tensors["rope_freqs.weight"] = (table.numpy(), F32)
    if edit:
        edit(writer, tensors)
    for tensor_name, (data, kind) in tensors.items():
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return theirs


def metadata(values, alignment=None):
    """A function for edit: add or replace metadata. A key given as None is left out.

    alignment: alignment of the tensors in bytes, if it is not the default.
    """

    def edit(writer, tensors):
        if alignment:
            writer.add_custom_alignment(alignment)
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds |= {str: writer.add_string, list: writer.add_array}
        for key, value in values.items():
            writer.kv_data[0].pop(key, None)
            if value is not None:
                kinds[type(value)](key, value)

    return edit


def with_vocabulary(values):
    """A function for edit: a vocabulary, and embeddings of its size."""

    def edit(writer, tensors):
        size = len(values["tokenizer.ggml.tokens"])
        table = torch.randn(size, SHAPE["hidden_size"])
        tensors["token_embd.weight"] = (table.numpy(), F32)
        metadata({**values, "llama.vocab_size": size})(writer, tensors)

    return edit
