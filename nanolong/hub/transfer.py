"""Import and export: a model from a folder, a hub id or a file becomes a run folder, and back."""

from dataclasses import asdict
from pathlib import Path

import torch

from data import tokenizer_from_json
from nanolong import run, tokenizer_files
from nanolong.errors import require
from nanolong.hub import gguf_model, gguf_tokenizer, nanogpt
from nanolong.hub.convert import check_config, export_model, import_model
from nanolong.hub.folder import find_folder, read_folder, whole, write_folder
from nanolong.hub.rope import by_kind
from nanolong.hub.tokenizer import NOT_WRITTEN, make_exported
from nanolong.hub.verify import as_user_error, compare, load_theirs
from nanolong.tokenizer_files import FILES

# Words, code, many scripts, composed and decomposed characters, joined emoji, control characters,
# and every kind of white space.
SAMPLE = (
    "The quick brown fox can't jump 3.14159 times over 1,024 lazy dogs' backs; it'll try, "
    "won't it?\n\n\tdef f(x, *, y=None):\n        return {'a': [x ** 2, -y]}  # tail   \n\r\n"
    "Fünf Größen, naïve café, Ærøskøbing; Ελληνικά, Русский текст, עברית, العربية, हिन्दी, "
    "中文字符, 日本語のテキスト, 한국어. ½ ² Ⅻ ١٢٣ 🙂👩‍👩‍👧 e\u0301   \u00a0\u3000aaaaaaa     "
    "\n   \n<b>&amp;</b> http://x.org/?q=%20#1 \x00\x01\x7f\u2581 WON'T 12345678 \ufeff"
)

# -----------------------------------------------------------------------------
# Import


def import_to(GPT, source, target, store="auto", tokenizer="", verify=True, context_length=0):
    """Write a model as the first checkpoint of a run folder; return its folder.

    GPT: the class of model.py. source: a folder, ORG/NAME of the hub, a .gguf, or a ckpt.pt of
    nanoGPT. store: dtype of the matrices, by default bfloat16 if the file has it. tokenizer: the
    folder of the tokenizer, if it is another. context_length: in tokens, if the files say another.
    Raises UserError, with nothing written.
    """
    target = Path(target)
    require(not run.list_steps(target), f"{target} holds a run already: choose another folder")
    place, found = open_source(source)
    with as_user_error(source):
        check_config(found.c)
        theirs = load_theirs(found.c, found.tensors)
        stored = {name: x for name, x in theirs.state_dict().items() if name not in found.added}
        model = import_model(GPT, found.c, stored, found.lengths, context_length)
    kept, bos, note = open_tokenizer(place, found, tokenizer, model.config.vocab_size)
    with as_user_error(source):
        report = compare(model, theirs) if verify else []
    meta = {
        "config": asdict(model.config),
        "tokenizer": kept and kept.to_json(),
        "bos": bos,
        "family": found.c.model_type,
        "imported": Path(source).resolve().name,
        "code": {},
    }
    weights, notes = stored_weights(model, store)
    is_untied = found.c.tie_word_embeddings and not model.config.tie_embeddings
    if is_untied and found.c.model_type != "bloom":  # whose head is untied by the import
        notes.append("the head is a tensor of its own, though tie_word_embeddings is true")
    folder = target / "step-000000"
    run.write_checkpoint(folder, {"model": weights}, meta)
    print_summary(folder, model)
    for text in filter(None, (*found.notes, *notes, note)):
        print(f"note: {text}")
    print_report(report)
    return folder


def open_source(source):
    """Return where a model is on this machine, and its Source."""
    path = Path(source)
    start = b""
    if path.is_file():
        with open(path, "rb") as stream:
            start = stream.read(4)
    # ollama's files have no suffix
    if start == b"GGUF" or path.suffix.lower() == ".gguf":
        return path, gguf_model.read_gguf(path)
    require(
        not path.is_file() or path.suffix.lower() not in (".safetensors", ".json", ".bin"),
        f"{path} is one file of a checkpoint, and its config.json and tokenizer are needed too: "
        f"give the folder that holds them all, such as {path.resolve().parent}",
    )
    if path.is_file() or path.suffix == ".pt":
        return path, nanogpt.read_checkpoint(path)
    folder = find_folder(source)
    return folder, read_folder(folder)


def open_tokenizer(place, found, named, vocab_size):
    """Return (tokenizer or None, the id that starts every text or None, a note or nothing).

    named: the folder that the user gives, or nothing.
    """
    ids = {name: getattr(found.c, name, None) for name in ("bos_token_id", "eos_token_id")}
    if not named and found.metadata:
        return gguf_tokenizer.read_tokenizer(place, found.metadata, vocab_size)
    if not named and place.is_file():
        return None, None, nanogpt.TOKENIZER_NOTE
    folder = Path(named or place)
    if not named and not (folder / "tokenizer.json").is_file():
        note = f"there is no tokenizer.json in {folder}: the model works on token ids only"
        if (folder / "tokenizer.model").is_file():
            note += " (for text, let transformers write one from tokenizer.model)"
        return None, None, note
    tokenizer, bos = tokenizer_files.read_tokenizer(folder, ids, vocab_size)
    if found.metadata:
        gguf_tokenizer.check_same_tokens(place, found.metadata, folder, tokenizer.package)
        if bos is None:
            bos = gguf_tokenizer.first_token(place, found.metadata, vocab_size)
    return tokenizer, bos, ""


def stored_weights(model, store):
    """Return the tensors of a checkpoint, and notes.

    store: dtype of the weights of linear layers and embeddings; all others are float32.
    """
    matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    matrices = {id(m.weight): m.weight.dtype for m in matrices}
    is_bfloat16 = set(matrices.values()) == {torch.bfloat16}
    if store == "auto":
        store = "bfloat16" if is_bfloat16 else "float32"
    notes = []
    if store == "bfloat16" and not is_bfloat16:
        notes = ["weights that are not bfloat16, or that the import computes, are rounded to it"]
    weights = {}
    for name, p in model.named_parameters():
        dtype = getattr(torch, store) if id(p) in matrices else torch.float32
        weights[name] = p.detach().to(dtype)
    return weights, notes


def print_summary(folder, model):
    config = model.config
    text = f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    text += f", context length {config.block_size} tokens"
    extension = config.extension
    if extension:
        text += f" (originally {config.original_length}, {extension['method']}, "
        text += f"factor {extension['factor']:g})"
    print(text)
    if extension and extension["method"] == "dynamic-ntk":
        print(
            "note: a dynamic scale follows the length of the text rounded up to a quarter of the "
            "original length; transformers takes the exact length, and keeps keys of older scales"
        )


def print_report(report):
    if report:
        print(f"verified: largest logit difference from transformers: {'; '.join(report)}")
    else:
        print("not verified: its logits were not compared with transformers' (--verify=false)")


# -----------------------------------------------------------------------------
# Export


def export_to(model, target, verify=True, tokenizer_from="", store="auto"):
    """Write a loaded model and its tokenizer, whole or not at all: a folder, or a .gguf file.

    tokenizer_from: a Hugging Face folder whose tokenizer is written in place of the model's own;
    of a GGUF file also "none". store: dtype of a GGUF's matrices. Raises UserError for a model that
    has no equivalent, or if transformers computes other logits.
    """
    target = Path(target)
    if target.suffix.lower() == ".gguf":
        export_gguf(model, target, verify, tokenizer_from, store)
        return
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    c, tensors = export_model(model)
    dtype = export_dtype(model, tensors)
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    eos = tokenizer and (tokenizer.bos if tokenizer.eos is None else tokenizer.eos)
    # a vocabulary of ours has one token that starts and ends every document
    ids = {"bos_token_id": tokenizer and tokenizer.bos, "eos_token_id": eos}

    def write(part):
        part.mkdir()
        files = exported_files(model, tokenizer, tokenizer_from)
        theirs = load_theirs(c, tensors)
        write_folder(part, theirs, ids)
        del theirs
        for name, content in files.items():
            (part / name).write_bytes(content)
        kind = by_kind(getattr(c, "rope_parameters", None))[0].get("rope_type", "none")
        text = f"{target}: {c.model_type}, rope_type {kind}, {model.config.block_size} tokens, "
        print(text + str(dtype).removeprefix("torch."))
        if not files:
            print(f"note: {NOT_WRITTEN}" if tokenizer else "note: the checkpoint has no tokenizer")
        report = []
        if verify:
            # what was written is read again
            found = read_folder(part)
            report = compare(model, load_theirs(found.c, found.tensors))
            if files and not tokenizer_from:
                report.append(compare_text(part, tokenizer))
        print_report(report)
        for file in part.iterdir():
            run.sync(file)

    whole(target, write)
    note_clients(c, model.config)


def export_dtype(model, tensors):
    """Return the dtype of the exported weights: as stored, or float32 if queries are scaled."""
    names = {name: x for name, x in tensors.items() if x.dim() == 2}
    is_stored = all(x.dtype == model.stored_dtype for x in names.values())
    return model.stored_dtype if is_stored else torch.float32


def exported_files(model, tokenizer, tokenizer_from):
    """Return the tokenizer files of an export: name -> bytes."""
    if tokenizer_from:
        source = Path(tokenizer_from)
        files = {name: source / name for name in FILES if (source / name).is_file()}
        require(
            files,
            f"there are no tokenizer files in --tokenizer={source}: give the Hugging Face folder "
            "that the model was imported from",
        )
        return {name: file.read_bytes() for name, file in files.items()}
    adds_bos = model.meta.get("bos") is not None
    exported = make_exported(tokenizer, adds_bos, model.config.block_size)
    return exported.files if exported else {}


def compare_text(folder, tokenizer):
    """Return whether transformers encodes a text as our tokenizer does."""
    from transformers import AutoTokenizer

    with as_user_error(folder):
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = theirs(SAMPLE, add_special_tokens=False)["input_ids"]
    if ids == tokenizer.encode(SAMPLE):
        return "text is encoded alike"
    # the files of an import are what they were
    return "its class of this tokenizer encodes text otherwise than tokenizer.json"


# what mlx-lm 0.32.2 computes as transformers does: without a window, only with RoPE that is not
# scaled, and with a window
MLX_LM = {*"llama mistral ministral3 qwen2 qwen3 smollm3 phi3 seed_oss olmo2 granite".split()}
MLX_LM_PLAIN = {"gemma", "stablelm"}
MLX_LM_WINDOW = {"olmo3", "gemma3_text", "exaone4"}


def note_clients(c, config):
    """Print whether mlx-lm may compute otherwise: it reads fewer fields, and says nothing."""
    rope = by_kind(getattr(c, "rope_parameters", None))[0]
    kind = rope.get("rope_type", "default")
    known = MLX_LM | MLX_LM_WINDOW | (MLX_LM_PLAIN if kind == "default" else set())
    is_read = c.model_type in (MLX_LM_WINDOW if config.window else known)
    is_read &= kind != "proportional" and rope.get("truncate", True)
    if c.model_type == "olmo3":
        is_read &= not config.rope_local_base
    if c.model_type == "gemma3_text":
        is_read &= hasattr(c, "sliding_window_pattern")
    if not is_read:
        print(f"note: mlx-lm has no {c.model_type} like this, or computes it otherwise")


def export_gguf(model, target, verify, tokenizer_from, store):
    """Write a model to one GGUF file."""
    require(not target.exists(), f"{target} exists already: remove it, or choose another file")
    c, tensors, rope = gguf_model.export_model(model)
    if store == "auto":
        store = str(export_dtype(model, tensors)).removeprefix("torch.")
    metadata = gguf_metadata(model, tokenizer_from)

    def write(part):
        gguf_model.write_gguf(part, model, c, tensors, rope, store, metadata)
        found = gguf_model.read_gguf(part)
        print(f"{target}: {c.model_type}, {model.config.block_size} tokens, {store}")
        # matrices that are rounded would differ: those of the model stand for them
        tensors_read = found.tensors if store == "float32" else tensors
        print_report(compare(model, load_theirs(found.c, tensors_read)) if verify else [])
        run.sync(part)

    whole(target, write)


def gguf_metadata(model, tokenizer_from):
    """Return the metadata of the tokenizer, or what says that there is none."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    bos = model.meta.get("bos")
    size = model.config.vocab_size
    if tokenizer_from and tokenizer_from != "none":
        tokenizer, _ = tokenizer_files.read_tokenizer(Path(tokenizer_from), {}, size)
    adds_bos = bos is not None
    exported = make_exported(tokenizer, adds_bos, model.config.block_size)
    if exported and tokenizer_from != "none":
        return gguf_tokenizer.tokenizer_metadata(exported, size, adds_bos)
    print("note: the file has no tokenizer: only token ids work")
    metadata = {"tokenizer.ggml.model": "none"}
    if adds_bos:
        metadata |= {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": True}
    return metadata
