"""Optuna's own plots of a search, from the stored trials, as inline SVG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from markupsafe import Markup
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from attngen import config as configs
from attngen.errors import AttngenError
from attngen.gpu import from_device_key
from attngen.records import RecordKey
from attngen.search_space import Axes, axes, encode
from attngen.spec import AttentionSpec
from attngen.trials import Trial
from attngen.workload import Bucket, Direction

MIN_FOR_IMPORTANCE = 10
"""Measured trials below which shares of the axes would be noise."""

# Colors that stand for the page's own, which follow the reader's light or dark theme.
_INK, _GRID = "#010203", "#010204"
_THEME = {_INK: "var(--ink)", _GRID: "var(--line)"}


def require_matplotlib() -> None:
    """Raises AttngenError, with the way out, where the plots cannot be drawn."""
    try:
        import matplotlib
    except ImportError:
        raise AttngenError(
            "the page needs matplotlib, which is not installed; pip install 'attngen[report]'"
        ) from None
    matplotlib.use("agg")  # no window, whatever the machine offers


def axes_of(key: RecordKey) -> Axes | None:
    """The axes that a key was searched on; None if this version cannot read the key."""
    gpu = from_device_key(key.device_key)
    try:
        spec = AttentionSpec.parse(key.text_key)
        return axes(spec, Bucket.parse(key.bucket), gpu) if gpu else None
    except AttngenError:
        return None


def study_of(direction: Direction, trials: list[Trial], space: Axes | None) -> Any:
    """The trials, in their order, as an Optuna study of microseconds.

    The axes are coded as the tuner's search codes them. A config off the axes has no parameters,
    one without a time is a failed trial.
    """
    distributions: dict[str, BaseDistribution] = {
        name: IntDistribution(0, len(values) - 1) for name, values in (space or {}).items()
    }
    with _quiet():
        study = optuna.create_study()
        for trial in trials:
            indices = _indices(direction, trial, space)
            timed = trial.status == "ok" and trial.median_us is not None
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if timed else TrialState.FAIL,
                    value=trial.median_us if timed else None,
                    params=indices,
                    distributions=distributions if indices else {},
                )
            )
    return study


def _indices(direction: Direction, trial: Trial, space: Axes | None) -> dict[str, int]:
    try:
        config = configs.from_dict(direction, trial.config)
    except (AttngenError, TypeError):
        return {}
    return (encode(config, space) if space else None) or {}


def history(study: Any, salt: str) -> Markup | None:
    """The optimization history; None without a measured trial."""
    if not _measured(study):
        return None

    def draw() -> Any:
        from matplotlib.ticker import LogLocator, NullLocator
        from optuna.visualization.matplotlib import plot_optimization_history

        ax = plot_optimization_history(study, target_name="microseconds")
        ax.set_title("")
        times = [trial.value or 0.0 for trial in _measured(study)]
        if max(times) > 1.5 * min(times):
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        return ax

    return _svg(draw, f"history {salt}", "Optimization history: microseconds of each trial")


def importances(study: Any, salt: str) -> tuple[Markup | None, int]:
    """The importance of each axis, if enough trials lie on the axes, and how many do."""
    with _quiet():
        on_axes = optuna.create_study()
        on_axes.add_trials([trial for trial in _measured(study) if trial.params])
    trials = on_axes.get_trials(deepcopy=False)
    names = (
        [n for n in trials[0].params if len({t.params[n] for t in trials}) > 1] if trials else []
    )
    if len(trials) < MIN_FOR_IMPORTANCE or not names or len({t.value for t in trials}) < 2:
        return None, len(trials)

    def draw() -> Any:
        from optuna.visualization.matplotlib import plot_param_importances

        ax = plot_param_importances(on_axes, params=names, target_name="microseconds")
        ax.set_title("", loc="left")
        ax.set_ylabel("")
        ax.get_legend().remove()
        return ax

    title = "Importance of each config field, Optuna's PED-ANOVA"
    return _svg(draw, f"importances {salt}", title), len(trials)


def _measured(study: Any) -> list[FrozenTrial]:
    found: list[FrozenTrial] = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return found


def _svg(draw: Callable[[], Any], salt: str, title: str) -> Markup:
    """What `draw` draws, as an SVG element for a page."""
    import matplotlib
    from matplotlib import pyplot

    out = io.StringIO()
    with matplotlib.rc_context(), _quiet():
        pyplot.style.use("default")
        figure = None
        try:
            figure = draw().figure
            _themed(figure)
            matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt})
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(out, format="svg", transparent=True, metadata=nothing)
        finally:
            pyplot.close(figure if figure is not None else "all")
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;]*;", "", text)  # the page's
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same in every figure
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    for color, name in _THEME.items():
        text = text.replace(color, name)
    return Markup(text.replace("<svg", f'<svg class="plot" role="img" aria-label="{title}"', 1))


def _themed(figure: Any) -> None:
    """Give a figure the page's ink and a size that a phone can show."""
    figure.set_size_inches(4.8, 3.0)
    for ax in figure.axes:
        ax.set_facecolor("none")
        ax.grid(True, color=_GRID)
        ax.tick_params(which="both", colors=_INK, labelsize=9)
        for spine in ax.spines.values():
            spine.set_edgecolor(_GRID)
        for text in (ax.xaxis.label, ax.yaxis.label, *ax.texts):
            text.set(color=_INK, fontsize=9)
        if (legend := ax.get_legend()) is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set(color=_INK, fontsize=8)
    figure.set_layout_engine("tight")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's notices of a new study and of experimental plots."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
