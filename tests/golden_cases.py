"""Run one group of golden.py's cases in the checkout that is the working directory.

python .../golden_cases.py GROUP FOLDER              writes FOLDER/GROUP.safetensors and .json
"""

import sys
import warnings
from pathlib import Path

from golden_names import Recorder


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
