"""Run one group of golden.py's cases in the checkout that is the working directory.

python .../golden_cases.py GROUP FOLDER              writes FOLDER/GROUP.safetensors and .json
"""

import json
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path.cwd()))

from nanolong.errors import UserError  # noqa: E402


class Recorder:
    """What the cases of a group found: "case | key" -> a tensor, or what JSON can hold."""

    def __init__(self):
        self.tensors, self.values = {}, {}

    @contextmanager
    def case(self, name):
        """Yield a dict to be filled with what is compared; a refusal is recorded as such."""
        found = {}
        try:
            yield found
        except UserError:
            found["refused"] = True
        except Exception:
            found["failed"] = traceback.format_exc()
        found = found or {"failed": "nothing was recorded"}
        for key, value in found.items():
            entry = f"{name} | {key}"
            assert entry not in self.values and entry not in self.tensors, entry
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(np.ascontiguousarray(value))
            if torch.is_tensor(value):
                self.tensors[entry] = value.detach().clone().contiguous()
            else:
                self.values[entry] = value

    def save(self, folder, group):
        save_file(self.tensors, folder / f"{group}.safetensors")
        # an imported tokenizer holds the bytes of its files
        text = json.dumps(self.values, indent=1, default=repr)
        (folder / f"{group}.json").write_text(text, encoding="utf-8")


def main():
    group, folder = sys.argv[1], Path(sys.argv[2])
    if group in ("kernels", "models", "extension", "generation"):
        import golden_models as cases
    else:
        import golden_scripts as cases
    warnings.simplefilter("ignore")
    record = Recorder()
    getattr(cases, group)(record, folder)
    record.save(folder, group)


if __name__ == "__main__":
    main()
