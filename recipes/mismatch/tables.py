"""Print and draw a report."""

from pathlib import Path

from rich.table import Table

from .causes import Report

__all__ = ["draw", "table"]

_SHOWN = 12


def table(report: Report) -> Table:
    """Return the found causes, largest share first, then the others by what they would remove alone."""
    made = Table("cause", "share", "alone", "left, mean", "largest", "setting that removes it")
    others = [cause for cause in report.alone if cause not in report.shares]
    for cause in [*report.shares, *others][:_SHOWN]:
        gap, share = report.alone[cause], report.shares.get(cause)
        removed = max(0.0, 1 - gap.mean / report.gap.mean)
        row = ["-" if share is None else f"{share:.0%}", f"{removed:.0%}", f"{gap.mean:.3g}", f"{gap.largest:.3g}"]
        made.add_row(cause.name, *row, cause.setting if share is not None else "", style=None if share else "dim")
    return made


def draw(title: str, report: Report, path: Path) -> None:
    """Write a PNG: the share of each found cause and of the unexplained rest, and what each cause removes alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rest = report.rest.mean / report.gap.mean
    shares = {**{cause.name: share for cause, share in report.shares.items()}, "not explained": rest}
    alone = {cause.name: max(0.0, 1 - gap.mean / report.gap.mean) for cause, gap in report.alone.items()}
    alone = dict(list(alone.items())[:_SHOWN])
    figure, (above, below) = plt.subplots(
        2,
        1,
        figsize=(8, 2 + 0.3 * (len(shares) + len(alone))),
        layout="constrained",
        height_ratios=[*map(len, (shares, alone))],
    )
    for axes, values, text in ((above, shares, "share of the difference"), (below, alone, "removed by each alone")):
        axes.barh(list(values), [100 * value for value in values.values()], color="tab:blue", alpha=0.6)
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), xlabel=f"{text}, %")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
