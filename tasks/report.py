"""What people look at after an evaluation: two plots, a table of numbers and answers side by side.

Results are those of `rl_core.evaluate` (`result.json`), rows those of its `samples.jsonl` and of a run's `metrics.jsonl`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
Results = Mapping[str, Mapping[str, Any]]

CURVES = (
    (("critic/score/mean",), "reward", "tab:blue"),
    (("response_length/mean",), "response length (tokens)", "tab:orange"),
    (("actor/reference_kl", "actor/ppo_kl"), "KL (nats per token)", "tab:green"),
)
"""Panels of the learning curve: metric (the first one that the run has), axis label, colour. Without a reference model the KL
is that of the update."""

COLOURS = {"base": "tab:gray", "champion": "tab:orange", "policy": "tab:blue"}
FEW_VALUES = 8
"""Up to so many different rewards are shown one by one."""
LONGEST_CELL = 600
"""Characters of a prompt or an answer shown in the samples."""


def read_jsonl(path: Path) -> Rows:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def learning_curve(metrics: Rows, path: Path) -> None:
    """Reward, response length and KL over the training steps, as a PNG.

    Args:
        metrics: rows of `metrics.jsonl`.
        path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [
        (next(name for name in names if name in metrics[0]), label, colour)
        for names, label, colour in CURVES
        if any(name in metrics[0] for name in names)
    ]
    figure = Figure(figsize=(8, 1.2 + 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Training: {len(metrics)} steps")
    axes: list[Axes] = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    for axis, (name, label, colour) in zip(axes, panels, strict=True):
        points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        few = len(points) <= 30
        axis.plot(steps, values, "o-" if few else "-", color=colour, alpha=0.35, linewidth=1, markersize=4, label="each step")
        window = max(2, len(values) // 10)
        axis.plot(steps, smoothed(values, window), "-", color=colour, linewidth=2, label=f"mean of the last {window}")
        axis.set_ylabel(label)
        axis.set_title(name, fontsize=9, loc="left", color="dimgray")
        axis.grid(alpha=0.3)
        axis.margins(y=0.15)
        axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1)
    axes[-1].set_xlabel("PPO step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each place (of fewer at the beginning)."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def reward_histogram(results: Results, path: Path) -> None:
    """How the rewards of the same prompts are spread, model by model, as a PNG.

    Args:
        results: model's name → its result.
        path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names, rewards = list(results), [result["rewards"] for result in results.values()]
    values = sorted({reward for column in rewards for reward in column})
    colours = [COLOURS[name] for name in names]
    labels = [f"{name}: mean {results[name]['reward']['mean']:.3f}" for name in names]
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    title = f"Rewards on {len(rewards[0])} held-out prompts, before and after training"
    if len(values) <= FEW_VALUES:  # bars beside each other at each value
        width = 0.7 / len(names)
        for i, column in enumerate(rewards):
            places = [place + width * (i - (len(names) - 1) / 2) for place in range(len(values))]
            bars = axis.bar(places, [column.count(value) for value in values], width, color=colours[i], label=labels[i])
            axis.bar_label(bars, fontsize=8)
        axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axis.set_xlim(-0.7, len(values) - 0.3)
        axis.margins(y=0.1)
    else:
        axis.hist(rewards, bins=12, color=colours, label=labels, rwidth=0.9)
        for i, name in enumerate(names):
            axis.axvline(results[name]["reward"]["mean"], color=colours[i], linestyle="--", linewidth=1.2)
        title += " (dashed: mean)"
    axis.set_title(title)
    axis.set_xlabel("reward of a response")
    axis.set_ylabel("responses")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=120)


def comparison(results: Results) -> str:
    """The numbers as a Markdown table, one column a model."""
    rows: list[tuple[str, Any]] = [
        ("reward", lambda result: _with_interval(result["reward"])),
        ("accuracy", lambda result: _with_interval(result["accuracy"])),
        ("KL to the base model", lambda result: f"{result['kl']['mean']:.4f}"),
        ("response length, mean (tokens)", lambda result: f"{result['response_length']['mean']:.1f}"),
        ("response length, longest", lambda result: f"{result['response_length']['max']:.0f}"),
        ("cut off at the longest length", lambda result: f"{result['truncated']:.1%}"),
        ("held-out prompts", lambda result: f"{result['prompts']}"),
    ]
    lines = [["", *results], ["---"] * (len(results) + 1)]
    lines += [[label, *(cell(result) for result in results.values())] for label, cell in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def samples(answers: Mapping[str, Rows], count: int) -> str:
    """The first prompts with each model's answer and reward side by side, as a Markdown table.

    Args:
        answers: model's name → rows of its `samples.jsonl`.
        count: prompts shown.
    """
    by_prompt = {name: {row["prompt_id"]: row for row in rows} for name, rows in answers.items()}
    lines = [["prompt", "expected", *by_prompt], ["---"] * (len(by_prompt) + 2)]
    for row in next(iter(answers.values()), [])[:count]:
        line = [_cell(row["prompt"]), _cell(row["ground_truth"] or "")]
        for rows in by_prompt.values():
            answer = rows.get(row["prompt_id"])
            line.append(f"{_cell(answer['response'])} **({answer['reward']:g})**" if answer else "")
        lines.append(line)
    return "Answers to the same held-out prompts; the reward in brackets.\n\n" + "".join(
        f"| {' | '.join(line)} |\n" for line in lines
    )


def _with_interval(score: Mapping[str, Any]) -> str:
    low, high = score["ci95"]
    return f"{score['mean']:.3f} ({low:.3f} to {high:.3f})"


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, within a table's cell."""
    short = text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "…"
    plain = re.sub(r"([\\`*_\[\]#|~$])", r"\\\1", short.strip())
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
