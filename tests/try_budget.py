"""The command line of an experiment with its smallest budget."""


def try_words(script, folder, *words, text=None):
    """The words of a run on a CPU in float32, which writes below a folder. text: its dataset."""
    dataset = [f"--dataset={text}"] if text else []
    folders = [f"--runs={folder}/runs", f"--out_dir={folder}/results"]
    fixed = ["--budget=try", "--device=cpu", "--dtype=float32"]
    return [f"experiments/{script}.py", *fixed, *folders, *dataset, *words]
