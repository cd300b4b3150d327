"""--plot of a run: a picture of losses and rewards."""
import importlib.util


def draw_curves(lines: list[dict], path: str):
    """Draw the losses of a metrics.jsonl, and the rewards if there are any."""
    if importlib.util.find_spec("matplotlib") is None:
        print("--plot: no picture without matplotlib: pip install matplotlib", flush=True)
        return
    import matplotlib

    matplotlib.use("Agg")  # files, no windows
    import matplotlib.pyplot as plt

    found = [k for k in ("loss", "val_loss", "reward_mean", "eval_reward") if any(line.get(k) is not None for line in lines)]
    panels = [names for names in ([k for k in found if "loss" in k], [k for k in found if "reward" in k]) if names]
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 4.5), squeeze=False, layout="constrained")
    for axis, names in zip(axes[0], panels):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axis.plot(*zip(*points), label=name, marker="o" if len(points) < 40 else "", markersize=3)
        axis.set(xlabel="step", ylabel="nats per token" if "loss" in names[0] else "reward")
        axis.grid(alpha=0.3), axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"picture: {path}", flush=True)
