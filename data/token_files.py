"""Token files, and the folders of datasets: how they are found, and their meta.json.

A dataset is a folder, data/NAME/ or any path, with token files for training and validation and the
meta.json that prepare.py writes. Token files have three forms: shards with a header of 256 int32
(llm.c's 20240520 with uint16 tokens, and its 20240801 with uint32), and nanoGPT's uint16 without a
header. Next to a token file NAME.bin may lie its mask, NAME.mask: a byte for each token.
"""

import contextlib
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np

from data.tokenizer import BPETokenizer
from nanolong.errors import UserError, note, require

HERE = Path(__file__).resolve().parent

# The header of a shard is 256 int32: magic, version, number of tokens, zeros. The number has the
# next int32 too, so that a file may hold more than 2^31 tokens.
# magic -> (version, dtype of the tokens)
HEADER = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
HEADER_BYTES = 1024
# bits of a mask: the token is scored as a target; a document starts with it
SCORED, STARTS = 1, 2


@contextlib.contextmanager
def token_writer(file: Path, vocab_size: int):
    """Open a new token file, of uint16, or uint32 if ids need it; yields its writer."""
    magic = 20240520 if vocab_size <= 1 << 16 else 20240801
    version, dtype = HEADER[magic]
    with open(file, "xb") as f:
        f.write(bytes(HEADER_BYTES))
        yield lambda ids: f.write(np.asarray(ids, dtype).tobytes())
        n_tokens = (f.tell() - HEADER_BYTES) // dtype.itemsize
        f.seek(0)
        f.write(np.array([magic, version], "<i4").tobytes())
        f.write(np.array(n_tokens, "<i8").tobytes())


def write_tokens(file: Path, ids, vocab_size: int):
    """Write token ids to a new file. Raises UserError for ids outside the vocabulary."""
    ids = np.asarray(ids)
    fits = ids.dtype.kind in "iu" and ids.size and 0 <= ids.min() and ids.max() < vocab_size
    require(fits, f"{file} is not written: give token ids, integers from 0 to {vocab_size - 1}")
    with token_writer(file, vocab_size) as write:
        write(ids)


def open_tokens(file: Path, vocab_size: int = 0) -> np.memmap:
    """Map a token file into memory, read-only: (tokens,), uint16 or uint32.

    vocab_size: size of the vocabulary, if it is known. Raises UserError for a damaged file, and for
    one without a header that is not uint16, as far as its values tell.
    """
    size = file.stat().st_size
    damage = f"{file} is truncated ({size} bytes), damaged or of an unknown version: "
    damage += "download or prepare it again"
    magic = 0
    if size >= HEADER_BYTES:
        magic, version = np.fromfile(file, "<i4", 2).tolist()
    if magic in HEADER:
        n = int(np.fromfile(file, "<i8", 2)[1])
        known_version, dtype = HEADER[magic]
        is_whole = version == known_version and n and size == HEADER_BYTES + n * dtype.itemsize
        require(is_whole, damage)
        return np.memmap(file, dtype, "r", HEADER_BYTES)
    # without a header only the values show damage
    require(size and size % 2 == 0, damage)
    tokens = np.memmap(file, "<u2", "r")
    n = len(tokens) // 2 * 2
    low, high = tokens[:n].reshape(-1, 2)[:: max(1, n // 8192)].T
    # The upper half of wider integers is 0, or small because the vocabulary is small.
    is_wider = len(low) >= 8 and (high.max() < 16 <= low.max() or high.max() == 0 < low.max())
    is_numpys = tokens[:3].tobytes() == b"\x93NUMPY"
    require(
        vocab_size <= 1 << 16 and not is_wider and not is_numpys,
        f"{file} has no header, so it should be uint16, as nanoGPT's files are, but it is a file "
        "of numpy.save(), holds integers of 4 or 8 bytes, or its vocabulary is above 65,536: write "
        "its ids again by data.write_tokens(file, ids, vocab_size)",
    )
    return tokens


def open_mask(file: Path, n_tokens: int) -> np.memmap:
    """Map the mask of a token file into memory, read-only: (n_tokens,) uint8, of SCORED and STARTS.

    Raises UserError for a missing or damaged one, and if no target is scored.
    """
    mask_file = file.with_suffix(".mask")
    problem = f"{mask_file} is missing, and another token file of the dataset has a mask"
    require(mask_file.is_file(), f"{problem}: write one for each token file, or remove the others")
    size = mask_file.stat().st_size
    problem = f"the mask of {file} has {size} bytes for {n_tokens} tokens"
    require(size == n_tokens, f"{problem}: prepare the dataset again")
    mask = np.memmap(mask_file, np.uint8, "r")
    remedy = f"write {SCORED} for a scored token, and {STARTS} more if a document starts with it"
    is_marked = mask[0] & STARTS and mask.max() <= SCORED | STARTS
    require(is_marked, f"{mask_file} starts no document at token 0, or has bytes above 3: {remedy}")
    problem = f"{mask_file} scores no token but the first ones of documents, which are not targets"
    require((mask == SCORED).any(), f"{problem}: {remedy}")
    return mask


def hash_files(files) -> str:
    """Hash token files and masks: 16 hexadecimal digits of SHA-256.

    Of a file of more than 64 MB only the size and 256 evenly spaced blocks of 64 KiB count.
    """
    digest = hashlib.sha256()
    for file in files:
        content = np.memmap(file, np.uint8, "r")
        size = len(content)
        digest.update(size.to_bytes(8, "little"))
        n, block = (256, 65536) if size > 64_000_000 else (1, size)
        for i in range(n):
            start = (size - block) * i // max(1, n - 1)
            digest.update(content[start : start + block])
    return digest.hexdigest()[:16]


def split_files(folder):
    """Find the token files of training and of validation by the words in their names."""
    found = []
    for name in ("train", "val"):
        # a word stands between other characters than letters: retrieval_train.bin has no val
        word = re.compile(rf"(?<![a-z]){name}(?![a-z])")
        files = [file for file in sorted(folder.glob("*.bin")) if word.search(file.name.lower())]
        remedy = "prepare a text by data/prepare.py, or copy nanoGPT's or llm.c's token files there"
        require(files, f"{folder} holds no {name}*.bin: {remedy}")
        found.append(files)
    for file in {*found[0]} & {*found[1]}:
        raise UserError(f"{file} could be of training or validation: name it after one of them")
    return found


# -----------------------------------------------------------------------------
# Finding datasets


def dataset_folder(name) -> Path:
    """Return data/NAME, where prepare.py writes a dataset."""
    return HERE / name


def find_dataset(name) -> Path:
    """Find the folder of a dataset: a path, or a name under data/.

    Raises UserError with the command that prepares it.
    """
    path = Path(name)
    for folder in (path, dataset_folder(name)):
        if any(folder.glob("*.bin")):
            return folder
    is_known = name in ("python", "shakespeare", "fineweb10B")
    source = f"--dataset={name}" if is_known else f"FILE_OR_FOLDER --name={path.stem}"
    ready = ", ".join(sorted(file.parent.name for file in HERE.glob("*/meta.json")))
    raise UserError(
        f"there is no dataset {str(name)!r} (there is {ready or 'none'}): prepare it with "
        f"python data/prepare.py {source}"
    )


def has_masks(name) -> bool:
    """Return whether a dataset has masks of scored targets."""
    return any(find_dataset(name).glob("*.mask"))


def split_mixture(name) -> dict[str, float]:
    """Split a mixture, as long:0.34,short:0.66, into its datasets and their fractions.

    Of one dataset, whose name may have colons too, it is {name: 1.0}. Raises UserError.
    """
    name = str(name)
    is_mixture = ":" in name or "," in name
    if not is_mixture or Path(name).exists() or dataset_folder(name).exists():
        return {name: 1.0}
    what = f"dataset={name}"
    fractions = read_fractions(name.split(","), what)
    total = math.fsum(fractions.values())
    require(abs(total - 1) <= 1e-6, f"the fractions of {what} add up to {total:g}: let it be 1")
    n_names = len({Path(source).name for source in fractions})
    require(n_names == len(fractions), f"{what} has two folders of the same name: rename one")
    return fractions


def read_fractions(words, what, most=1.0) -> dict[str, float]:
    """Read words such as "long:0.3" into {name: fraction}. Raises UserError; what: the setting."""
    bound = f" and at most {most:g}" if math.isfinite(most) else ""
    fractions = {}
    for word in words:
        name, _, number = word.strip().rpartition(":")
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        require(
            name and name not in fractions and 0 < fraction <= most and math.isfinite(fraction),
            f"{what}: give each name once, with a number above 0{bound}, as in NAME:0.3,OTHER:0.7",
        )
        fractions[name] = fraction
    return fractions


def short_name(name) -> str:
    """Return a name for the folder of a run (a mixture: long+short)."""
    return "+".join(Path(source).name for source in split_mixture(name))


def vocabulary_size(name) -> int:
    """Return the size of the vocabulary of a dataset, or the largest one of a mixture."""
    return max(read_meta(find_dataset(source))["vocab_size"] for source in split_mixture(name))


# -----------------------------------------------------------------------------
# meta.json


def read_meta(folder):
    """Read the meta.json of a dataset: tokenizer, vocab_size, bos, bos_default and more.

    The tokenizer is as in the meta.json of a checkpoint, with the contents of its files.
    """
    file = folder / "meta.json"
    if not file.is_file():
        return meta_of_bare_files(folder)
    remedy = "prepare the dataset again"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        spec, bos, _ = (meta[key] for key in ("tokenizer", "bos", "bos_default"))
        ids = range(meta["vocab_size"])
        if spec and "files" in spec:
            files = [folder / Path(name).name for name in spec["files"]]  # none of another folder
            spec["files"] = {file.name: file.read_bytes() for file in files}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error!r}): {remedy}") from None
    require(bos is None or bos in ids, f"{file} is damaged (bos is {bos!r}): {remedy}")
    return meta


def meta_of_bare_files(folder):
    """Describe token files without a meta.json, as nanoGPT and llm.c write them: GPT-2's tokens."""
    require(
        not (folder / "meta.pkl").exists(),
        f"the vocabulary of {folder} is in meta.pkl, a pickle, which nanoLong does not open: make "
        "it from the text with python data/prepare.py input.txt --tokenizer=char --name=NAME",
    )
    remedy = "write a meta.json with tokenizer (or null), vocab_size, bos and bos_default"
    tokens = open_tokens(min(folder.glob("*.bin")))
    require(tokens.itemsize == 2, f"{folder} holds uint32 tokens of some vocabulary: {remedy}")
    # any text in GPT-2's tokens has words beyond the first thousand
    top = int(tokens[: 1 << 16].max())
    if len(tokens) > 4096 and top < 1000:
        note(f"{folder} is taken for GPT-2's tokens, but its ids end at {top}: {remedy}")
    try:
        tokenizer = BPETokenizer.named("gpt2").to_json()
    except UserError:
        # Training goes on without it; bits per byte and sampled text need the vocabulary.
        tokenizer = None
    return {"tokenizer": tokenizer, "vocab_size": 50257, "bos": 50256, "bos_default": False}
