"""Tables and plots of records that are written out here."""

import builtins
import math

import pytest
import torch

from nanolong import plots


def loss(checkpoint, length, value, protocol="chunked", **fields):
    """A record as evaluate.py makes it; a text in place of a loss is the reason of a refusal."""
    record = {"checkpoint": checkpoint, "task": "loss", "protocol": protocol, "length": length}
    record.update(fields)
    if isinstance(value, str):
        return {**record, "refused": value}
    known = {"low": value - 0.02, "high": value + 0.02, "n": 40}
    return {"loss": value, **known, "tokens": 100, **record}


def needle(checkpoint, length, depth, accuracy):
    """A record as evaluate.py makes it; None in place of an accuracy is a refusal."""
    record = {"checkpoint": checkpoint, "task": "needle", "length": length, "depth": depth}
    if accuracy is None:
        return {**record, "refused": "too short"}
    return {**record, "accuracy": accuracy, "low": accuracy / 2, "high": 1.0, "n": 64, "nll": 1.0}


@pytest.fixture
def losses():
    """Two checkpoints by three protocols at two lengths, one of which the second one refuses."""
    records = []
    for protocol, fields in (("chunked", {}), ("sliding", {"stride": 8})):
        for name in ("rope", "learned"):
            records.append(loss(name, 64, 1.25, protocol, **fields))
        records.append(loss("rope", 128, 2.5, protocol, **fields))
        records.append(loss("learned", 128, "no such position", protocol, **fields))
    for name in ("rope", "learned"):
        for length in (64, 128):
            if (name, length) == ("learned", 128):
                records.append(loss(name, length, "no such position", "position"))
                continue
            for start in (0, length // 2):
                part = [start, start + length // 2]
                records.append(loss(name, length, 3.0, "position", position=part))
    return records


@pytest.fixture
def needles():
    """Two checkpoints at two depths and two lengths, of which one is refused."""
    records = []
    for name in ("rope", "learned"):
        for length in (64, 128):
            refused = (name, length) == ("learned", 128)
            for depth, accuracy in ((0.0, 0.5), (1.0, 1.0), (None, 0.01)):
                records.append(needle(name, length, depth, None if refused else accuracy))
    return records


def is_png(file):
    return file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5000


def test_loss_table_has_a_line_per_checkpoint_and_a_column_per_length(losses):
    lines = plots.format_loss_table(losses, (64, 128)).splitlines()
    assert lines[:4] == [
        "chunked (every token), nats per token, by context length",
        "                         64              128",
        "rope          1.250 ± 0.020    2.500 ± 0.020",
        "learned       1.250 ± 0.020          refused",
    ]
    assert lines[4].split() == ["sequences", "40", "40"]
    sliding = "sliding (the last tokens of overlapping sequences), stride 8"
    assert lines[6] == f"{sliding}, nats per token, by context length"
    assert lines[12:18] == [
        "position, nats per token, in sequences of 64 tokens, up to position (40 sequences)",
        "               32     64",
        "rope        3.000  3.000",
        "rope ±      0.020  0.020",
        "learned     3.000  3.000",
        "learned ±   0.020  0.020",
    ]
    assert lines[22] == "learned      refused"


def test_losses_that_differ_from_the_first_are_marked():
    """Of the same sequences; one loss is known of three sequences only, so it has no interval."""
    apart = {"difference": {"mean": 0.1, "low": 0.01, "high": 0.2, "n": 40}}
    near = {"difference": {"mean": 0.1, "low": -0.01, "high": 0.2, "n": 40}}
    few = {"low": None, "high": None, "n": 3, "difference": {**apart["difference"], "low": None}}
    records = [loss("a", 64, 1.0), loss("b", 64, 1.1, **apart), loss("c", 64, 1.1, **near)]
    lines = plots.format_loss_table([*records, loss("d", 64, 1.1, **few)], (64,)).splitlines()
    assert [line.split()[1:] for line in lines[2:6]] == [
        ["1.000", "±", "0.020"],
        ["1.100", "±", "0.020*"],
        ["1.100", "±", "0.020"],
        ["1.100", "(n", "=", "3)"],
    ]
    assert lines[-1].startswith("* differs from the first checkpoint")


def test_tables_name_each_reason_of_a_refusal_once(losses, needles):
    text = plots.format_loss_table(losses, (64, 128))
    assert text.count("no such position") == 1
    assert text.endswith("refused: learned at 128: no such position")
    assert plots.format_needle_table(needles, (64, 128)).endswith(
        "refused: learned at 128: too short"
    )


def test_needle_table_has_a_line_per_depth_and_the_control(needles):
    lines = plots.format_needle_table(needles, (64, 128)).splitlines()
    assert [" ".join(line.split()) for line in lines[2:7]] == [
        "rope",
        "depth 64 128",
        "0.00 ▒▒▒ 0.50 (0.25 to 1.00) ▒▒▒ 0.50 (0.25 to 1.00)",
        "1.00 ███ 1.00 (0.50 to 1.00) ███ 1.00 (0.50 to 1.00)",
        "no key 0.01 (0.01 to 1.00) 0.01 (0.01 to 1.00)",
    ]
    assert lines[10].split()[-1] == "refused"


def test_loss_curves_are_by_length_or_by_position_at_the_greatest_length(losses):
    curves = plots.loss_curves(losses, "chunked")
    assert [point[:4] for point in curves["rope"]] == [
        (64, 1.25, 1.23, 1.27),
        (128, 2.5, 2.48, 2.52),
    ]
    assert [point[:2] for point in curves["learned"]] == [(64, 1.25)]
    (points,) = plots.loss_curves(losses, "position").values()
    assert [point[:2] for point in points] == [(64, 3.0), (128, 3.0)]


def test_terminal_plot_marks_points_by_letters():
    series = {
        "one": [(256, 1.0), (1024, 3.0)],
        "two": [(256, 1.0), (1024, 2.0), (2048, math.nan)],
    }
    lines = plots.terminal_plot(series).splitlines()
    assert lines[0].startswith("  3.000 |")
    assert lines[0].endswith("A")
    assert lines[12].startswith("  1.000 |*")  # both curves begin there
    assert lines[-3].split() == ["256", "1024"]
    assert lines[-2:] == ["  A one", "  B two"]


@pytest.mark.parametrize(
    "lengths, shown",
    [
        ([64, 256, 1024, 4096, 5120, 6144, 7168], "64 256 1024 4096 7168"),
        (range(64, 7169, 64), "64 128 192 256 384 512 704 960 1280 1856 2688 3840 7168"),
        ([64, 7168], "64 7168"),
        ([7168], "7168"),
    ],
)
def test_terminal_plot_labels_the_first_and_the_last_length(lengths, shown):
    text = plots.terminal_plot({"one": [(length, 1.0) for length in lengths]})
    assert " ".join(text.splitlines()[-2].split()) == shown


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_terminal_plot_without_points_says_so(points):
    assert plots.terminal_plot({"one": points}) == "nothing to plot"


@pytest.mark.parametrize("points", [[(5, 1.0)], [(5, 1.0), (5, 2.0)], [(5, 1.0), (9, 1.0)]])
def test_terminal_plot_of_a_single_length_or_loss(points):
    assert "A one" in plots.terminal_plot({"one": points})


def test_terminal_plot_of_more_curves_than_letters():
    series = {f"curve {i}": [(1, float(i)), (2, float(i))] for i in range(30)}
    lines = plots.terminal_plot(series).splitlines()
    assert lines[-4] == "  A curve 26"
    assert len([line for line in lines if "curve" in line]) == 30


def test_figures_are_png_files(losses, needles, tmp_path, capsys):
    losses += [loss(name, 66, 1.0, "chunked") for name in ("rope", "learned")]  # labels would touch
    losses += [loss(name, 66, 1.0, "sliding", stride=8) for name in ("rope", "learned")]
    plots.plot_losses(losses, (64, 66, 128), str(tmp_path / "a.png"), "note", title="title")
    plots.plot_needle_heatmaps(needles, (64, 128), str(tmp_path / "b.png"), "note")
    assert is_png(tmp_path / "a.png")
    assert is_png(tmp_path / "b.png")
    assert capsys.readouterr().out.count("wrote") == 2


def test_figures_where_everything_is_refused(tmp_path):
    records = [loss("learned", length, "too long") for length in (64, 128)]
    plots.plot_losses(records, (64, 128), str(tmp_path / "a.png"), "note")
    cells = [needle("learned", 64, depth, None) for depth in (0.0, None)]
    plots.plot_needle_heatmaps(cells, (64,), str(tmp_path / "b.png"), "note")
    assert is_png(tmp_path / "a.png")
    assert is_png(tmp_path / "b.png")


def test_wavelengths_say_what_an_extension_changes(tmp_path, capsys):
    """YaRN of 32 pairs from 1,024 to 4,096 tokens: 18 periods fit, and pairs from 6 on change."""
    before = 1e4 ** -(torch.arange(32, dtype=torch.float64) / 32)
    after = torch.where(torch.arange(32) < 6, before, before / 4)
    plots.plot_wavelengths(before, after, 1024, 4096, str(tmp_path / "w.png"), "YaRN")
    text = capsys.readouterr().out
    assert "18 complete a period within the original 1024" in text
    assert "26 are lengthened" in text
    assert "from 47,117 to 188,469" in text  # 2 pi 10000^(31/32), times 4
    assert "original length 1024" in text
    assert is_png(tmp_path / "w.png")


def test_pairs_that_are_not_rotated_have_no_wavelength(tmp_path, capsys):
    """Of p-RoPE the slow half, and of a method that drops RoPE all."""
    before = torch.cat((1e4 ** -(torch.arange(16, dtype=torch.float64) / 32), torch.zeros(16)))
    plots.plot_wavelengths(before, before / 4, 64, 256, str(tmp_path / "w.png"), "PI")
    text = capsys.readouterr().out
    assert "16 are lengthened, the longest from 471 to 1,885; 16 are not rotated" in text
    assert "inf" not in text and is_png(tmp_path / "w.png")

    plots.plot_wavelengths(before, 0 * before, 64, 256, str(tmp_path / "d.png"), "DroPE")
    text = capsys.readouterr().out
    assert "0 are lengthened; 32 are not rotated" in text and "inf" not in text
    assert is_png(tmp_path / "d.png")


def test_without_matplotlib_a_note_takes_the_place_of_the_figure(
    losses, tmp_path, monkeypatch, capsys
):
    real_import = builtins.__import__

    def import_without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_matplotlib)
    plots.plot_losses(losses, (64, 128), str(tmp_path / "a.png"), "note")
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "a.png").exists()
