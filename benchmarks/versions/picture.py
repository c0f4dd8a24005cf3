"""Memory by version as a picture: a panel for each model, a line for each method and trainer.

In: versions.csv's rows. Out: file name → image bytes.
"""

from typing import Any

from vramprobe.report import plots
from vramprobe.units import GIB

_STYLES = {"trainer": "-", "trl": "--"}
_SIZE = (9.0, 6.4)


def files(found: list[dict[str, Any]]) -> dict[str, bytes]:
    """versions.svg."""
    shown = [row for row in found if row["peak_bytes"]]
    return {"versions.svg": plots.images(("svg",), _SIZE, lambda figure: _draw(figure, shown))["svg"]}


def _draw(figure: Any, found: list[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(row["run"].split()[0] for row in found))
    stacks = sorted({(row["day"], row["stack"]) for row in found})
    places = {stack: at for at, (_, stack) in enumerate(stacks)}
    labels = [stack.removeprefix("hf-") for _, stack in stacks]
    panels = figure.subplots(-(-len(models) // 2), 2, squeeze=False).ravel()
    for axes, model in zip(panels, models, strict=False):
        of_model = [row for row in found if row["run"].split()[0] == model]
        for name in dict.fromkeys(row["run"] for row in of_model):
            line = [row for row in of_model if row["run"] == name]
            marker, colour = plots.METHODS[line[0]["method"]]
            axes.plot(
                [places[row["stack"]] for row in line],
                [int(row["peak_bytes"]) / GIB for row in line],
                color=colour,
                marker=marker,
                linestyle=_STYLES[line[0]["trainer"]],
                markersize=4.5,
                linewidth=1.3,
            )
        name, _, num_layers = model.partition(":")
        axes.set_title(f"{name}, {num_layers} layers" if num_layers else name, loc="left", fontsize=9)
        axes.set_xticks(range(len(stacks)), labels, rotation=45, ha="right")
        axes.set(ylabel="peak, GiB allocated", ylim=(0, None), xlim=(-0.4, len(stacks) - 0.6))
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=method)
        for method, (marker, colour) in plots.METHODS.items()
    ]
    handles += [Line2D([], [], color="black", linestyle=style, label=name) for name, style in _STYLES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
