"""Two pictures of a study: curves.png and differences.png. Without matplotlib the report says that pictures need matplotlib."""
import importlib.util

import numpy as np


def draw_study(study: dict, curves: dict, rows: list[dict], folder) -> str:
    """Write both pictures; return text about the pictures, to print after the names of other files.

    curves: {variant: [(steps, metric) of each run]}; rows: as in verdicts.json.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "; no pictures without matplotlib: pip install matplotlib"
    import matplotlib

    matplotlib.use("Agg")  # files, no windows
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, found in curves.items():
        x = np.unique(np.concatenate([x for x, _ in found]))
        y = np.array([np.interp(x, *points) for points in found])
        (line,) = axis.plot(x, y.mean(0), label=f"{name} ({len(found)} seeds)", marker="." if len(x) < 40 else None)
        axis.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
    axis.set(xlabel="step", ylabel=study["metric"], title="mean of the seeds; the band goes from the lowest to the highest")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(folder / "curves.png", dpi=120)
    plt.close(figure)

    shown = [row for row in rows if row["low"] is not None]
    figure, axis = plt.subplots(figsize=(8, 1.5 + 0.5 * len(shown)), layout="constrained")
    colors = {"better": "tab:green", "worse": "tab:red", "undecided": "tab:gray", "identical": "tab:blue"}
    for y, row in enumerate(reversed(shown)):
        reach = [[row["difference"] - row["low"]], [row["high"] - row["difference"]]]
        axis.errorbar(row["difference"], y, xerr=reach, fmt="o", capsize=5, color=colors[row["verdict"]])
        axis.annotate(row["verdict"], (row["difference"], y), xytext=(0, 7), textcoords="offset points", ha="center")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(shown)), [row["variant"] for row in reversed(shown)])
    axis.set(ylim=(-0.6, len(shown) - 0.2), xlabel=f"{study['metric']}: variant minus {study['baseline']}, 95 % interval")
    figure.savefig(folder / "differences.png", dpi=120)
    plt.close(figure)
    return ", curves.png, differences.png"
