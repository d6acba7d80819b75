/* Uses the page as a person does, with events, and tells what came of it: in the title if it is the whole window, else to the frame
   around it. */
(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  const found = { errors: window.failures };
  const text = selector => (document.querySelector(selector) || {}).textContent || "";
  try {
    await frame();
    const canvas = document.querySelector("#timeline-section canvas");
    const box = canvas.getBoundingClientRect();
    const view = () => [Number(canvas.dataset.from), Number(canvas.dataset.to)];
    const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, pointerId: 1, bubbles: true, cancelable: true });
    const pointer = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, at(x, y)));
    const key = name => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
    const after = async act => { act(); await frame(); await frame(); return view(); };
    found.tasks = Number(canvas.dataset.tasks);
    found.drawn = Number(canvas.dataset.drawn);
    found.whole = view();
    const names = new Set();
    for (let y = 5; y < box.height; y += 10) {
      for (let x = 1; x < box.width; x += 7) {
        pointer("pointermove", x, y);
        const tip = document.querySelector("#timeline-section .tip");
        if (!tip.hidden) names.add(tip.querySelector("b").textContent);
      }
    }
    found.named = names.size;
    found.tip = text("#timeline-section .tip");
    pointer("pointerleave", 0, 0);
    const wheel = by => canvas.dispatchEvent(new WheelEvent("wheel", { ...at(box.width / 2, 30), deltaY: by }));
    found.wheel = await after(() => wheel(-200));
    found.dragged = await after(() => {
      pointer("pointerdown", box.width / 2, 30);
      pointer("pointermove", box.width / 2 + 60, 30);
      pointer("pointerup", box.width / 2 + 60, 30);
    });
    found.key = await after(() => key("+"));
    found.moved = await after(() => key("ArrowRight"));
    found.back = await after(() => key("0"));
    const buttons = [...document.querySelectorAll("#timeline-section button")];
    found.button = await after(() => buttons[0].click());
    await after(() => buttons[buttons.length - 1].click());
    await after(() => key("."));
    const first = text("#timeline-section output");
    await after(() => key("."));
    found.selected = [first, text("#timeline-section output")];
    await after(() => key("Escape"));
    found.left = text("#timeline-section output");
    const plot = document.querySelector("#runs-section .plot");
    if (plot) {
      const area = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: area.right - 1, clientY: area.top + 20, bubbles: true }));
      found.value = text("#runs-section .tip");
      plot.dispatchEvent(new PointerEvent("pointerleave"));
      const label = document.querySelector(".legend.runs label");
      const shown = () => [...document.querySelectorAll("#runs-section path[data-run='0']")].filter(p => p.style.display !== "none").length;
      found.curves = shown();
      label.click();
      found.hidden = shown();
      label.click();
    }
    const root = document.documentElement;
    found.width = root.clientWidth;
    found.overflow = root.scrollWidth - root.clientWidth;
    found.background = getComputedStyle(document.body).backgroundColor;
    found.regions = {};
    for (const selector of [".cards", "#timeline-section canvas", "#runs-section .plot", "#memory-section .plot", ".tree", "#certificate-section table"]) {
      const e = document.querySelector(selector);
      const r = e && e.getBoundingClientRect();
      if (r) found.regions[selector] = [r.left + scrollX, r.top + scrollY, r.width, r.height].map(Math.round);
    }
  } catch (error) {
    found.errors.push(String(error && error.stack || error));
  }
  const said = JSON.stringify(found);
  if (window.parent !== window) window.parent.postMessage(said, "*");
  else document.body.append(Object.assign(document.createElement("pre"), { id: "found", hidden: true, textContent: said }));
})();
