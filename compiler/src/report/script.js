(() => {
"use strict";
document.documentElement.classList.add("js");
const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const scaled = (x, units, by) => {
  let i = 0;
  while (x >= by && i + 1 < units.length) { x /= by; i++; }
  return (x >= 100 || i === 0 && Number.isInteger(x) ? x.toFixed(0) : x.toPrecision(3)) + " " + units[i];
};
const bytes = x => scaled(x, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const count = (x, unit) => scaled(x, ["", "k", "M", "G", "T", "P"], 1000) + unit;
const time = ns => ns >= 1e9 ? (ns / 1e9).toPrecision(4) + " s" : ns >= 1e6 ? (ns / 1e6).toPrecision(4) + " ms"
  : (ns / 1e3).toPrecision(ns < 1e3 ? 2 : 4) + " µs";

/* A box beside the pointer, within its parent. */
const place = (tip, parent, x, y) => {
  tip.hidden = false;
  const right = x + 16 + tip.offsetWidth > parent.clientWidth;
  tip.style.left = Math.max(0, right ? x - 12 - tip.offsetWidth : x + 16) + "px";
  tip.style.top = y + 16 + "px";
};

/* Charts: values of all runs at the step under the pointer; runs can be hidden. */
const figures = [...document.querySelectorAll("#runs-section .chart")].map(figure => {
  const of = key => Number(figure.dataset[key]);
  const [x0, x1, y0, y1, log] = ["x0", "x1", "y0", "y1", "log"].map(of);
  const plot = figure.querySelector(".plot");
  const value = y => log ? y0 * Math.pow(y1 / y0, 1 - y / 300) : y0 + (y1 - y0) * (1 - y / 300);
  const form = { seconds: v => time(1e9 * v), bytes }[figure.dataset.form]
    || (v => v === 0 ? "0" : Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6 ? v.toExponential(2) : String(Number(v.toPrecision(4))));
  const curves = [...plot.querySelectorAll("path[data-run]")].map(path => {
    const points = path.getAttribute("d").split(/[ML]/).slice(1).map(p => p.split(" ").map(Number));
    return { run: Number(path.dataset.run), kind: path.classList[0], points };
  });
  const cross = plot.appendChild(make("div", "cross"));
  cross.hidden = true;
  return { x0, x1, plot, value, form, curves, cross };
});
const nearest = (points, x) => {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (points[mid][0] < x) low = mid; else high = mid;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
};
const runs = document.querySelector(".legend.runs");
const hidden = new Set();
if (runs) {
  const section = document.getElementById("runs-section");
  section.style.position = "relative";
  const tip = section.appendChild(make("div", "tip"));
  tip.hidden = true;
  const names = [...runs.children].map(label => label.textContent);
  const leave = () => { tip.hidden = true; figures.forEach(f => { f.cross.hidden = true; }); };
  figures.forEach(figure => {
    figure.plot.addEventListener("pointermove", event => {
      const box = figure.plot.getBoundingClientRect();
      const x = 1000 * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const step = Math.round(figure.x0 + (figure.x1 - figure.x0) * x / 1000);
      figures.forEach(f => {
        f.cross.style.left = 100 * (step - f.x0) / (f.x1 - f.x0) + "%";
        f.cross.hidden = step < f.x0 || step > f.x1;
      });
      tip.replaceChildren(make("b", "", "step " + step));
      const list = tip.appendChild(make("dl"));
      for (const { run, kind, points } of figure.curves) {
        if (hidden.has(run)) continue;
        const point = nearest(points, x);
        const at = Math.round(figure.x0 + (figure.x1 - figure.x0) * point[0] / 1000);
        const what = { smooth: ", smoothed", dots: ", validation" }[kind] || "";
        list.append(make("dt", "", names[run] + what), make("dd", "", figure.form(figure.value(point[1])) + (at === step ? "" : " at " + at)));
      }
      const outer = section.getBoundingClientRect();
      place(tip, section, event.clientX - outer.left, event.clientY - outer.top);
    });
    figure.plot.addEventListener("pointerleave", leave);
  });
  runs.querySelectorAll("label").forEach(label => {
    const run = Number(label.dataset.run);
    label.tabIndex = 0;
    label.setAttribute("role", "switch");
    label.setAttribute("aria-checked", "true");
    const toggle = () => {
      if (!hidden.delete(run)) hidden.add(run);
      const off = hidden.has(run);
      label.classList.toggle("off", off);
      label.setAttribute("aria-checked", String(!off));
      section.querySelectorAll(`.plot [data-run="${run}"]`).forEach(e => { e.style.display = off ? "none" : ""; });
    };
    label.addEventListener("click", toggle);
    label.addEventListener("keydown", event => {
      if (event.key === " " || event.key === "Enter") { event.preventDefault(); toggle(); }
    });
  });
}

/* The timeline. */
const source = document.getElementById("timeline-data");
if (!source) return;
const data = JSON.parse(source.textContent);
const holder = document.getElementById("timeline-view");
const N_PARTS = data.parts.length;
const task = i => {
  const [name, scope, kind, unit, kernel, place, flops, size] = data.tasks.slice(8 * i, 8 * i + 8);
  const word = k => data.words[k];
  return { name: word(name), scope: word(scope), kind: word(kind), unit: word(unit), kernel: word(kernel),
    stream: Math.floor(place / N_PARTS), part: place % N_PARTS, flops, size };
};
const tasks = Array.from({ length: data.tasks.length / 8 }, (_, i) => task(i));
const lanes = [];
const groups = data.groups.map((group, g) => {
  const rows = new Map(data.streams.map(([index, name]) => [index, { g, name, spans: [] }]));
  let at = 0, end = 0;
  const mean = new Map();
  for (let i = 0; i < group.spans.length; i += 3) {
    const [k, start, long] = group.spans.slice(i, i + 3);
    at += start;
    end = Math.max(end, at + long);
    rows.get(tasks[k].stream).spans.push({ k, start: at, end: at + long });
    const sum = mean.get(k) || [0, 0];
    mean.set(k, [sum[0] + long, sum[1] + 1]);
  }
  lanes.push(...rows.values());
  return { title: group.title, end, mean };
});
const total = Math.max(1, ...groups.map(g => g.end));
const TITLE = 22, LANE = 26, BAR = 20, AXIS = 22, GUTTER = 56;
lanes.forEach((lane, i) => { lane.first = i === 0 || lanes[i - 1].g !== lane.g; });
let y = 0;
lanes.forEach(lane => { if (lane.first) y += TITLE; lane.y = y; y += LANE; });
const height = y + AXIS + 4;

const tools = make("div", "tools");
const canvas = make("canvas");
canvas.tabIndex = 0;
canvas.style.height = height + "px";
canvas.setAttribute("role", "application");
canvas.setAttribute("aria-label", "timeline; plus and minus zoom, left and right move, comma and period go from task to task, 0 shows all");
canvas.dataset.tasks = String(lanes.reduce((n, lane) => n + lane.spans.length, 0));
const tip = make("div", "tip");
tip.hidden = true;
const said = make("output");
said.setAttribute("aria-live", "polite");
holder.replaceChildren(tools, canvas, tip);

let from = 0, to = total, selected = null, pending = false;
const extent = () => Math.max(1, canvas.clientWidth - GUTTER);
/* Where in the view a pixel is, from 0 to 1. */
const share = px => (px - GUTTER) / extent();
const clampView = () => {
  const width = Math.min(total, Math.max(to - from, Math.min(total, 20)));
  from = Math.min(Math.max(0, from), total - width);
  to = from + width;
};
const zoom = (factor, at) => {
  const x = from + (to - from) * at;
  from = x - (x - from) * factor;
  to = x + (to - x) * factor;
  clampView();
  draw();
};
const pan = part => { const by = part * (to - from); from += by; to += by; clampView(); draw(); };
const all = () => { from = 0; to = total; draw(); };
const button = (text, title, act) => {
  const b = make("button", "", text);
  b.title = title;
  b.setAttribute("aria-label", title);
  b.addEventListener("click", act);
  tools.append(b);
};
button("+", "zoom in", () => zoom(.5, .5));
button("−", "zoom out", () => zoom(2, .5));
button("←", "move left", () => pan(-.25));
button("→", "move right", () => pan(.25));
button("all", "show all", all);
tools.append(make("span", "", "wheel or pinch zooms, drag moves, a double click fits a task; keys: + − ← → 0 , ."), said);

const style = () => {
  const computed = getComputedStyle(document.documentElement);
  const color = name => computed.getPropertyValue("--" + name).trim();
  return { fg: color("fg"), dim: color("dim"), line: color("line"), bg: color("bg"), parts: data.parts.map(([c]) => color(c)) };
};
const nice = rough => {
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  return [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
};
const firstAfter = (spans, t) => {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const mid = (low + high) >> 1;
    if (spans[mid].end < t) low = mid + 1; else high = mid;
  }
  return low;
};
const paint = () => {
  pending = false;
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const c = canvas.getContext("2d"), colors = style();
  c.scale(ratio, ratio);
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  const x = t => GUTTER + (t - from) / (to - from) * extent();
  const step = nice((to - from) / Math.max(3, width / 130));
  const precise = t => step < 1e3 ? (t / 1e3).toFixed(3) + " µs" : step < 1e6 && t < 1e6 ? Math.round(t / 1e3) + " µs"
    : step < 1e9 && t < 1e9 ? String(Number((t / 1e6).toFixed(Math.max(0, 6 - Math.floor(Math.log10(step)))))) + " ms"
    : String(Number((t / 1e9).toFixed(Math.max(0, 9 - Math.floor(Math.log10(step)))))) + " s";
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    c.fillStyle = colors.line;
    c.fillRect(Math.round(x(t)), 0, 1, height - AXIS + 4);
    c.fillStyle = colors.dim;
    const text = precise(t), wide = c.measureText(text).width;
    c.fillText(text, Math.min(Math.max(GUTTER, x(t) - wide / 2), width - wide - 2), height - AXIS / 2);
  }
  let drawn = 0;
  for (const lane of lanes) {
    if (lane.first) {
      c.fillStyle = colors.fg;
      c.font = "600 12px system-ui, sans-serif";
      c.fillText(groups[lane.g].title + " · " + time(groups[lane.g].end), 6, lane.y - TITLE / 2 + 3);
      c.font = "11px system-ui, sans-serif";
    }
    const top = lane.y + (LANE - BAR) / 2;
    c.fillStyle = colors.dim;
    c.fillText(lane.name, 6, top + BAR / 2);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width, height);
    c.clip();
    let until = -1, last = -1;
    for (let i = firstAfter(lane.spans, from); i < lane.spans.length && lane.spans[i].start <= to; i++) {
      const span = lane.spans[i], part = tasks[span.k].part;
      const a = Math.max(GUTTER - 2, x(span.start)), b = Math.min(width + 2, Math.max(x(span.end), a + .7));
      if (b <= until + .3 && part === last) continue;
      c.fillStyle = colors.parts[part];
      const gap = b - a > 3 ? .5 : 0;
      c.fillRect(a, top, b - a - gap, BAR);
      [until, last] = [b, part];
      drawn++;
      if (b - a > 44) {
        c.save();
        c.beginPath();
        c.rect(a, top, b - a - 4, BAR);
        c.clip();
        c.fillStyle = "#fff";
        c.fillText(tasks[span.k].name, Math.max(a, GUTTER) + 5, top + BAR / 2 + .5);
        c.restore();
      }
    }
    c.restore();
  }
  if (selected) {
    const { lane, span } = selected;
    c.strokeStyle = colors.fg;
    c.lineWidth = 2;
    c.beginPath();
    c.rect(GUTTER - 2, 0, width, height);
    c.clip();
    c.strokeRect(x(span.start), lane.y + (LANE - BAR) / 2 - 1, Math.max(2, x(span.end) - x(span.start)), BAR + 2);
  }
  canvas.dataset.drawn = String(drawn);
  canvas.dataset.from = String(Math.round(from));
  canvas.dataset.to = String(Math.round(to));
};
const draw = () => {
  if (!pending) { pending = true; requestAnimationFrame(paint); }
};

const find = (px, py) => {
  const lane = lanes.find(l => py >= l.y && py < l.y + LANE);
  if (!lane || px < GUTTER - 3) return null;
  const unit = (to - from) / extent(), t = from + (px - GUTTER) * unit;
  let best = null, far = 3 * unit;
  for (let i = firstAfter(lane.spans, t - far); i < lane.spans.length && lane.spans[i].start <= t + far; i++) {
    const span = lane.spans[i];
    const off = t < span.start ? span.start - t : t > span.end ? t - span.end : 0;
    if (off <= far && (best === null || off < far)) { best = { lane, span, index: i }; far = off; }
  }
  return best;
};
const describe = ({ lane, span }) => {
  const t = tasks[span.k], long = span.end - span.start, group = groups[lane.g];
  const rows = [["kind", t.kind], ["part", data.parts[t.part][1] + ", " + lane.name], ["module", t.scope || "–"]];
  if (t.unit) rows.push(["unit", t.unit]);
  if (t.kernel && t.kernel !== t.name) rows.push(["kernel", t.kernel]);
  rows.push(["duration", time(long)]);
  groups.forEach((other, g) => {
    const sum = other.mean.get(span.k);
    if (g !== lane.g && sum && (g === 0 || lane.g === 0)) rows.push([other.title.replace(/,.*micro.*/, ""), time(sum[0] / sum[1])]);
  });
  if (rows.length > 12) rows.splice(12);
  rows.push(["start", time(span.start)]);
  if (t.flops) rows.push(["FLOP", count(t.flops, "") + (long ? ", " + count(t.flops / long * 1e9, "FLOP/s") : "")]);
  if (t.size) rows.push(["bytes", bytes(t.size) + (long ? ", " + count(t.size / long * 1e9, "B/s") : "")]);
  return { title: t.name, rows, text: `${t.name}: ${t.kind}, ${time(long)}, ${group.title}` };
};
const show = (found, px, py) => {
  if (!found) { tip.hidden = true; return; }
  const { title, rows } = describe(found);
  tip.replaceChildren(make("b", "", title));
  const list = tip.appendChild(make("dl"));
  rows.forEach(([name, value]) => list.append(make("dt", "", name), make("dd", "", value)));
  place(tip, holder, px, py + canvas.offsetTop);
};
const select = found => {
  selected = found;
  said.textContent = found ? describe(found).text : "";
  draw();
};
const reveal = found => {
  const { span } = found, wide = to - from;
  if (span.start < from || span.end > to) {
    from = (span.start + span.end) / 2 - wide / 2;
    to = from + wide;
    clampView();
  }
};

let scrolled = -1e9;
addEventListener("scroll", () => { scrolled = performance.now(); }, { passive: true });
canvas.addEventListener("wheel", event => {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  const whole = to - from >= total;
  /* Whoever scrolls past is not stopped. */
  if (!sideways && !event.ctrlKey && (performance.now() - scrolled < 250 || whole && event.deltaY > 0)) return;
  event.preventDefault();
  if (sideways) pan((event.deltaX || event.deltaY) / extent());
  else zoom(Math.exp(Math.max(-.7, Math.min(.7, event.deltaY * .003))), Math.max(0, share(event.offsetX)));
}, { passive: false });

const pointers = new Map();
let moved = false;
canvas.addEventListener("pointerdown", event => {
  pointers.set(event.pointerId, event.offsetX);
  moved = false;
  try { canvas.setPointerCapture(event.pointerId); } catch { /* It was released already. */ }
});
canvas.addEventListener("pointermove", event => {
  const before = pointers.get(event.pointerId);
  if (before === undefined) { show(find(event.offsetX, event.offsetY), event.offsetX, event.offsetY); return; }
  if (Math.abs(event.offsetX - before) < 2 && !moved) return;
  moved = true;
  tip.hidden = true;
  const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
  pointers.set(event.pointerId, event.offsetX);
  if (others.length) {
    const was = Math.abs(before - others[0]), is = Math.abs(event.offsetX - others[0]);
    if (was > 8 && is > 8) zoom(was / is, share(others[0]));
  } else pan((before - event.offsetX) / extent());
});
const release = event => {
  const tapped = pointers.delete(event.pointerId) && !moved && event.type === "pointerup";
  if (!tapped) return;
  const found = find(event.offsetX, event.offsetY);
  select(found);
  show(found, event.offsetX, event.offsetY);
};
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("dblclick", event => {
  const found = find(event.offsetX, event.offsetY);
  if (!found) { all(); return; }
  const { span } = found, wide = Math.max(1, span.end - span.start);
  from = span.start - wide;
  to = span.end + wide;
  clampView();
  select(found);
});
const next = by => {
  const spans = l => l.spans;
  let lane = selected ? selected.lane : lanes.find(l => l.spans.length);
  if (!lane) return;
  const index = selected ? selected.index + by : Math.min(firstAfter(spans(lane), from), lane.spans.length - 1);
  if (index < 0 || index >= lane.spans.length) return;
  const found = { lane, span: lane.spans[index], index };
  reveal(found);
  select(found);
  show(found, GUTTER + (found.span.start - from) / (to - from) * extent(), lane.y + LANE / 2);
};
const across = by => {
  const withTasks = lanes.filter(l => l.spans.length);
  const at = selected ? withTasks.indexOf(selected.lane) + by : 0;
  const lane = withTasks[at];
  if (!lane) return;
  const t = selected ? selected.span.start : from;
  const index = Math.min(firstAfter(lane.spans, t), lane.spans.length - 1);
  selected = { lane, span: lane.spans[index], index };
  next(0);
};
const keys = { "+": () => zoom(.5, .5), "=": () => zoom(.5, .5), "-": () => zoom(2, .5), "0": all, ArrowLeft: () => pan(-.2),
  ArrowRight: () => pan(.2), ",": () => next(-1), ".": () => next(1), ArrowUp: () => across(-1), ArrowDown: () => across(1),
  Home: () => { to -= from; from = 0; clampView(); draw(); }, End: () => { from += total - to; to = total; clampView(); draw(); },
  Escape: () => { tip.hidden = true; select(null); } };
canvas.addEventListener("keydown", event => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
new ResizeObserver(draw).observe(canvas);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
paint();
})();
