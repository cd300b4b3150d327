"""Pictures of curves: of one run (--plot), and of the runs of a study (ablate.py)."""
import numpy as np


def draw_curves(panels: list[tuple[str, dict]], path) -> str:
    """Draw [(unit, {name: [(steps, values) of each run]})] side by side, each band from the lowest run to the highest. Returns
    a line to print: the path, or the package to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(8 * len(panels), 5), layout="constrained")
    for axis, (unit, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name, found in curves.items():
            x = np.unique(np.concatenate([x for x, _ in found]))
            y = np.array([np.interp(x, *points) for points in found])
            (line,) = axis.plot(x, y.mean(0), label=name, marker="." if len(x) < 40 else None)
            axis.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3), axis.legend()
    figure.savefig(path, dpi=120)
    return f"picture: {path}"
