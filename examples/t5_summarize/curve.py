#!/usr/bin/env python3
"""Draw the losses of runs as an SVG figure: the training loss as a line, the validation loss as points.

    python3 curve.py OUT/metrics.jsonl ... > curve.svg
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 50, 20, 16, 40
COLORS = ["#2563eb", "#d97706", "#059669", "#9333ea"]


def smooth(values, n=20):
    """The mean of each value and those before it."""
    return [sum(values[max(0, i + 1 - n):i + 1]) / min(i + 1, n) for i in range(len(values))]


def main(paths):
    runs = []
    for path in paths:
        with open(path) as file:
            lines = [json.loads(line) for line in file]
        trained, validated = ([(line["step"] + 1, line[key]) for line in lines if key in line] for key in ("loss", "validation_loss"))
        steps, losses = zip(*trained)
        runs.append((path, list(zip(steps, smooth(losses))), validated))
    end = max(trained[-1][0] for _, trained, _ in runs)
    losses = [loss for _, *both in runs for points in both for _, loss in points]
    low, high = math.floor(min(losses)), math.ceil(max(losses))

    def at(step, loss):
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / end
        return f"{x:.1f}", f"{TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low):.1f}"

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for loss in range(low, high + 1):
        (x, y), (right, _) = at(0, loss), at(end, loss)
        out.append(f'<path d="M{x} {y}H{right}" stroke="#e5e7eb"/><text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{loss}</text>')
    for tick in range(0, 6):
        x, y = at(end * tick / 5, low)
        out.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{end * tick // 5}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">steps</text>')
    for i, (path, trained, validated) in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        line = "L".join(" ".join(at(*point)) for point in trained)
        out.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for step, loss in validated:
            x, y = at(step, loss)
            out.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"><title>validation loss {loss:.3f} after {step} steps</title></circle>')
        out.append(f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 16 + 18 * i}" text-anchor="end" fill="{color}">'
                   f"{path}: training (line, mean of 20 steps), validation (points)</text>")
    print("\n".join([*out, "</svg>"]))


if __name__ == "__main__":
    main(sys.argv[1:])
