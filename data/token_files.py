"""Token files, and the folders of datasets: how they are found, and what their meta.json says.

A dataset is a folder, data/NAME/ or any path, with token files for training and validation and the
meta.json that prepare.py writes. Token files have three forms: shards with a header of 256 int32
(llm.c's 20240520 with uint16 tokens, and its 20240801 with uint32), and nanoGPT's uint16 without a
header.
"""

import hashlib
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np

from data.tokenizer import BPETokenizer
from nanolong import tokenizer_files
from nanolong.errors import UserError, note, require

HERE = Path(__file__).resolve().parent

# The header of a shard is 256 int32: magic, version, number of tokens, zeros.
# magic -> (version, dtype of the tokens)
HEADER = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
HEADER_BYTES = 1024
# A header counts up to 2^31 - 1 tokens: a file with so many is full.
FULL = 2_000_000_000


def write_tokens(file: Path, ids, vocab_size: int):
    """Write token ids to a new file, as uint16, or as uint32 if the vocabulary needs it."""
    write_parts(file.parent, file.stem, [ids], vocab_size)


def write_parts(folder, name, parts, vocab_size) -> int:
    """Write token ids that come in parts to NAME.bin, and what is beyond FULL to NAME-1.bin, ...

    Returns how many there are.
    """
    magic = 20240520 if vocab_size <= 1 << 16 else 20240801
    version, dtype = HEADER[magic]
    header = np.zeros(256, "<i4")
    parts = iter(parts)
    n_tokens = 0
    for number in itertools.count():
        file = folder / (f"{name}-{number}.bin" if number else f"{name}.bin")
        n = 0
        with open(file, "xb") as f:
            f.write(header.tobytes())
            for ids in parts:
                f.write(np.asarray(ids, dtype).tobytes())
                n += len(ids)
                if n >= FULL:
                    break
            header[:3] = magic, version, n
            f.seek(0)
            f.write(header.tobytes())
        n_tokens += n
        if n < FULL:
            break
    if number and not n:
        file.unlink()
    return n_tokens


def open_tokens(file: Path, vocab_size: int = 0) -> np.memmap:
    """Map a token file into memory, read-only: (tokens,), uint16 or uint32.

    vocab_size: of the tokens, if it is known. Raises UserError for a damaged file, and for one
    without a header that is not uint16.
    """
    size = file.stat().st_size
    damage = f"{file} is truncated ({size} bytes), damaged or of an unknown version: "
    damage += "download or prepare it again"
    magic, version, n = 0, 0, size // 2
    if size >= HEADER_BYTES:
        magic, version, n = np.fromfile(file, "<i4", 3).tolist()
    if magic not in HEADER:
        require(size and size % 2 == 0, damage)
        tokens = np.memmap(file, "<u2", "r")
        other = "a vocabulary above 65,536" if vocab_size > 1 << 16 else find_other_type(tokens)
        what = (
            f"{file} has no header, so it should be uint16, as nanoGPT's files are, but it is of "
        )
        remedy = "write its ids again by data.write_tokens(file, ids, vocab_size)"
        require(not other, f"{what}{other}: {remedy}")
        return tokens
    known_version, dtype = HEADER[magic]
    is_whole = version == known_version and n > 0 and size == HEADER_BYTES + n * dtype.itemsize
    require(is_whole, damage)
    return np.memmap(file, dtype, "r", HEADER_BYTES)


def find_other_type(tokens):
    """Say what uint16 numbers are if they cannot be tokens; None if they can."""
    pairs = tokens[: len(tokens) // 2 * 2].reshape(-1, 2)
    low, high = pairs[:: max(1, len(pairs) // 4096)].T
    if len(low) < 8:
        return None
    # the upper half of a wider integer is 0, or small because the vocabulary is
    if not low.any() or not high.any() or high.max() < 16 <= low.max():
        return "integers of 4 or 8 bytes"
    # text has letters in both bytes; of a token the lower byte can be anything
    are_letters = (low & 0x8080 == 0) & (low >= 0x900)
    return "bytes of text" if are_letters.mean() > 0.9 else None


def hash_files(files) -> str:
    """Hash token files: 16 hexadecimal digits of SHA-256.

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
    for name, ends in (("train", "ing"), ("val", "id|idation")):
        # a word stands between other characters than letters: constraint.bin is not for training
        word = re.compile(rf"(?<![a-z]){name}({ends})?(?![a-z])")
        files = sorted(folder.glob("*.bin"))
        found.append([file for file in files if word.search(file.name.lower())])
        remedy = "prepare a text by data/prepare.py, or copy nanoGPT's or llm.c's token files there"
        require(found[-1], f"{folder} holds no {name}*.bin: {remedy}")
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
    is_path = path.is_absolute() or len(path.parts) > 1
    for folder in (path, dataset_folder(name)):
        if folder.is_dir() and (is_path or any(folder.glob("*.bin"))):
            return folder
    text = shlex.quote(str(path))
    if path.exists():
        own = re.sub(r"[^\w-]+", "-", path.stem).strip("-_") or "text"
        raise UserError(
            f"{path} is a text, not a dataset: run python data/prepare.py {text} --name={own}, and "
            f"then python train.py --dataset={own}"
        )
    require(
        "," not in str(name),
        f"{name!r} names several datasets: give each a fraction, as in "
        "long:0.34,short:0.66, or choose one",
    )
    is_known = name in ("python", "shakespeare", "fineweb10B")
    words = f"--dataset={name}" if is_known else f"FILE_OR_FOLDER --name={text}"
    raise UserError(
        f"there is no dataset {name!r}: prepare it with python data/prepare.py {words}, or choose "
        f"one that is ready ({', '.join(file.parent.name for file in HERE.glob('*/meta.json'))})"
    )


def split_mixture(name) -> dict[str, float]:
    """Split a mixture, as long:0.34,short:0.66, into its datasets and their fractions.

    Of one dataset, whose name may have colons too, it is {name: 1.0}. Raises UserError.
    """
    name = str(name)
    if ":" not in name or Path(name).exists() or dataset_folder(name).exists():
        return {name: 1.0}
    items = name.split(",")
    fractions = read_fractions(items)
    if all(map(math.isnan, fractions.values())):
        # one dataset, or several without fractions: find_dataset() says what to do
        return {name: 1.0}
    total = math.fsum(fractions.values())
    are_several = len({Path(source).name for source in fractions}) == len(items)
    require(are_several, f"dataset={name} has two datasets of the same name: rename one's folder")
    require(
        abs(total - 1) <= 1e-6 and min(fractions.values()) > 0,
        f"the fractions of dataset={name} add up to {total:g}: give each dataset one above 0, and "
        "let them add to 1, as in long:0.34,short:0.66",
    )
    return fractions


def read_fractions(items):
    """Read words such as "long:0.3": name -> fraction, nan if there is none."""
    fractions = {}
    for item in items:
        name, _, number = item.strip().rpartition(":")
        try:
            fractions[name] = float(number)
        except ValueError:
            fractions[item.strip()] = math.nan
    return fractions


def short_name(name) -> str:
    """Return a name for the folder of a run: of a mixture long+short."""
    return "+".join(Path(source).name for source in split_mixture(name))


def vocabulary_size(name) -> int:
    """Return the size of the vocabulary of a dataset, or of the first one of a mixture."""
    first = next(iter(split_mixture(name)))
    return read_meta(find_dataset(first))["vocab_size"]


# -----------------------------------------------------------------------------
# meta.json


def read_meta(folder):
    """Read the meta.json of a dataset: tokenizer, vocab_size, bos, bos_default and more."""
    file = folder / "meta.json"
    if not file.is_file():
        return meta_of_bare_files(folder)
    remedy = "prepare the dataset again"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        ids = range(meta["vocab_size"])
        spec, bos, _ = (meta[key] for key in ("tokenizer", "bos", "bos_default"))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error!r}): {remedy}") from None
    require(bos is None or bos in ids, f"{file} is damaged (bos is {bos!r}): {remedy}")
    checksums = meta.get("sha256", {})
    return meta | {"tokenizer": tokenizer_files.read(folder, spec, checksums, remedy)}


def meta_of_bare_files(folder):
    """Describe token files without a meta.json, as nanoGPT and llm.c write them: GPT-2's tokens."""
    require(
        not (folder / "meta.pkl").exists(),
        f"the vocabulary of {folder} is in meta.pkl, a pickle, which nanoLong does not open: make "
        "it from the text with python data/prepare.py input.txt --tokenizer=char --name=NAME",
    )
    remedy = "write a meta.json with tokenizer (or null), vocab_size, bos and bos_default"
    for file in sorted(folder.glob("*.bin"))[:1]:
        tokens = open_tokens(file)
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
