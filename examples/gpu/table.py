"""The rows of check.sh as one page of Markdown."""

from rows import unit


def render(check):
    lines = [f"Frit {check.kit['commit']}, plans for {check.kit['device']} {check.kit['arch']}."]
    if check.stopped:
        lines.append(f"\n**Stopped**: {check.stopped}.")
    lines.append("")
    for stage, rows in check.known.items():
        lines += summary(stage, rows, check.expected(stage), check.kit["commit"])
    sets = software_sets(check.known)
    lines += timings(check, sets)
    for number, software in enumerate(sets, 1):
        lines += ["", f"Software {number}:", ""] + [f"- {what}: {found}" for what, found in software.items()]
    return "\n".join(lines)


def summary(stage, rows, expected, commit):
    """How many rows are good, and what is wrong with the others."""
    good = sum(1 for row in rows.values() if row["ok"])
    skipped = [name for name, row in rows.items() if row["ok"] is None]
    missing = sorted(expected - rows.keys())
    others = {row["commit"] for row in rows.values()} - {commit}
    text = f"- {stage}: {good} of {len(expected | rows.keys())} rows are good"
    if others:
        text += f" (some of {', '.join(sorted(others))})"
    if skipped:
        text += f", {len(skipped)} not run"
    if missing:
        text += f", {len(missing)} missing: {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}"
    lines = [text]
    for name, row in rows.items():
        if row["ok"] is False:
            lines.append(f"  - **{name}**: {one_line(row.get('note', ''))}")
        elif stage == "machine" or row["ok"] is None:
            lines.append(f"  - {name}: {one_line(row.get('note', ''))}")
    return lines


def one_line(text):
    return " ".join(text.split())[:900]


def software_sets(known):
    """The different machines that rows were made on."""
    sets = []
    for rows in known.values():
        for row in rows.values():
            if row.get("software") and row["software"] not in sets:
                sets.append(row["software"])
    return sets


def timings(check, sets):
    lines = ["", "| model | program | batch | per second | ms | MFU | beside eager | beside compile | beside llm.c "
             "| peak memory, GiB | kernels | gaps | attention | software |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for e in check.of("time"):
        rows = programs(check, e["name"])
        # A variant is beside the peers of what it is one of.
        peers = programs(check, e.get("of", e["name"]))
        compiled = {name: row for name, row in peers.items() if name.startswith("pytorch compile")}
        # Compiled is what its best mode is.
        best = max(compiled, key=lambda name: compiled[name]["rate"], default=None)
        rates = [peers.get("pytorch eager", {}).get("rate"), compiled[best]["rate"] if best else None, peers.get("llm.c", {}).get("rate")]
        for program, row in rows.items():
            beside = [f"{row['rate'] / rate:.2f}" if rate else "" for rate in rates]
            memory = f"{row['peak_allocated_bytes'] / 2 ** 30:.1f}" if row.get("peak_allocated_bytes") else ""
            mfu = f"{row['mfu']:.1%}" if row.get("mfu") else ""
            gap = f"{row['gap']:.1%}" if row.get("gap") is not None else ""
            mark = " (best)" if program == best and len(compiled) > 1 else ""
            number = sets.index(row["software"]) + 1 if row.get("software") in sets else ""
            variant = e["name"].removeprefix(e.get("of", e["name"])).replace("-", ", ")
            cells = [e["model"] + variant, program + mark, row["batch"], f"{row['rate']:.0f} {unit(e)}", f"{row['step_s'] * 1e3:.2f}", mfu,
                     *beside, memory, row.get("kernels", ""), gap, row.get("sdpa") or "", number]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def programs(check, name):
    """The good rows of a timed plan, by program."""
    prefix = name + " "
    return {key.removeprefix(prefix): row for key, row in check.known["time"].items() if key.startswith(prefix) and row["ok"]}
