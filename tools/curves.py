"""Pictures of curves: of one run (--plot), and of the runs of a study (ablate.py)."""
import importlib.util

import numpy as np


def import_pyplot():
    """matplotlib.pyplot, or None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")  # files, no windows
    import matplotlib.pyplot as plt

    return plt


def draw_curves(panels: list[tuple[str, dict]], path) -> str:
    """Draw [(unit, {name: [(steps, values) of each run]})] side by side, each band from the lowest run to the highest. Returns
    a line to print: the path, or the package to install."""
    if (plt := import_pyplot()) is None:
        return "no picture without matplotlib: pip install matplotlib"
    figure, axes = plt.subplots(1, len(panels), figsize=(8 * len(panels), 5), squeeze=False, layout="constrained")
    for axis, (unit, curves) in zip(axes[0], panels):
        for name, found in curves.items():
            x = np.unique(np.concatenate([x for x, _ in found]))
            y = np.array([np.interp(x, *points) for points in found])
            (line,) = axis.plot(x, y.mean(0), label=name, marker="." if len(x) < 40 else None)
            axis.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3), axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path}"
