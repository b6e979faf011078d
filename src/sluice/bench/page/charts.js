"use strict";
// Charts of one results file: hand-written SVG, drawn at the width of their place, no dependencies.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  const workloads = new Map(data.workloads.map((w) => [w.name, w]));
  const rows = data.rows.filter((r) => r.status === "ok" && r.median_s > 0);
  const providers = data.providers.map((p) => p.name).filter((n) => rows.some((r) => r.provider === n));
  const title = Object.fromEntries(data.providers.map((p) => [p.name, p.title]));
  const colour = (name) => `var(--c${Math.max(0, data.providers.findIndex((p) => p.name === name)) % 10})`;
  const state = { hidden: new Set(), op: null, model: null, heatOp: null, peer: null, only: "all", time: "graph" };
  const allOps = [...new Set(data.workloads.map((w) => w.op))];
  const chosen = (op) => state.only === "all" || op === state.only;
  // the time that the charts against size show: of replayed graphs, or of eager calls by the wall clock
  const hasEager = rows.some((r) => r.eager);
  const timed = (r) => (state.time === "eager" ? r.eager : r);

  // ------------------------------------------------------------------------------- small pieces

  function svg(name, attributes = {}, ...children) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    for (const child of children) node.append(child);
    return node;
  }
  function html(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    for (const child of children) node.append(child);
    return node;
  }
  const unique = (values) => [...new Set(values)];
  function digits(x) {
    return x >= 99.95 ? Math.round(x).toLocaleString("en") : x >= 9.995 ? x.toFixed(1) : x.toFixed(2);
  }
  function duration(s) {
    return s >= 1 ? `${digits(s)} s` : s >= 1e-3 ? `${digits(s * 1e3)} ms` : `${digits(s * 1e6)} µs`;
  }
  function rate(w, s) {
    const [value, unit] = w.unit === "flops" ? [w.flops / s, "FLOP/s"] : [w.bytes / s, "B/s"];
    return value >= 1e12 ? `${digits(value / 1e12)} T${unit}` : `${digits(value / 1e9)} G${unit}`;
  }
  function short(x) {
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const found = units.find(([size]) => x >= size);
    return found ? `${+(x / found[0]).toPrecision(3)}${found[1]}` : `${+x.toPrecision(3)}`;
  }
  const rank = (w) => (w.tp > 1 ? `${w.model}, TP ${w.tp}` : w.model) + stateNote(w);
  const stateNote = (w) => (w.state_dtype === "float32" ? "" : `, ${w.state_dtype} state`) + (w.variant ? `, ${w.variant}` : "");

  function logScale(low, high, from, to) {
    const [a, b] = [Math.log10(low), Math.log10(high)];
    return (x) => from + ((Math.log10(x) - a) / (b - a || 1)) * (to - from);
  }
  // powers of ten, with 2 and 5 between them where there is room
  function ticks(low, high, most) {
    const at = (steps) => {
      const found = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
        for (const step of steps) {
          const x = step * 10 ** e;
          if (x >= low * 0.999 && x <= high * 1.001) found.push(x);
        }
      }
      return found;
    };
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      const found = at(steps);
      if (found.length <= most && found.length > 1) return found;
    }
    return at([1]).length ? at([1]) : [low, high];
  }

  const tip = $("tip");
  function explain(node, text) {
    const show = (event) => {
      tip.textContent = text;
      const box = node.getBoundingClientRect();
      const x = event && event.clientX ? event.clientX : box.x + box.width / 2;
      const y = box.y + window.scrollY;
      tip.style.visibility = "visible";
      const left = Math.min(x + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
      tip.style.left = `${Math.max(8, left) + window.scrollX}px`;
      tip.style.top = `${y - tip.offsetHeight - 10 < window.scrollY ? y + 24 : y - tip.offsetHeight - 10}px`;
    };
    const hide = () => { tip.style.visibility = "hidden"; };
    node.setAttribute("tabindex", "0");
    node.setAttribute("aria-label", text.replaceAll("\n", ", "));
    node.classList.add("mark");
    for (const kind of ["pointerenter", "focus", "click"]) node.addEventListener(kind, show);
    for (const kind of ["pointerleave", "blur"]) node.addEventListener(kind, hide);
    return node;
  }
  function about(r) {
    const w = workloads.get(r.workload);
    const lines = [`${title[r.provider]}${r.detail ? ` (${r.detail})` : ""}`, `${w.op} ${w.size}, ${rank(w)}`];
    lines.push(`${duration(r.median_s)} (${duration(r.p10_s)} to ${duration(r.p90_s)}), ${rate(w, r.median_s)}`);
    if (r.eager) lines.push(`eager: ${duration(r.host.median_s)} of the host, ${duration(r.eager.median_s)} per call by the wall clock`);
    if (r.share) lines.push(`${Math.round(r.share * 100)}% of the floor (${r.bound})`);
    if (r.error !== null) lines.push(`relative error ${r.error.toExponential(0)}, by ${r.method}`);
    return lines.join("\n");
  }
  function clear(id) {
    const place = $(id);
    place.replaceChildren();
    return [place, Math.max(260, place.clientWidth)];
  }
  function finish(place, drawing, marks) {
    if (marks) place.append(drawing);
    else place.append(html("p", { class: "empty" }, "Nothing was measured for this chart."));
    place.dataset.marks = marks;
  }
  function axes(drawing, box, xs, ys, x, y, label, format) {
    const group = svg("g", { class: "axis" });
    for (const t of ys) {
      group.append(svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(t), y2: y(t) }));
      group.append(svg("text", { x: box.left - 6, y: y(t) + 4, "text-anchor": "end" }, format.y(t)));
    }
    for (const t of xs) {
      group.append(svg("line", { class: "gridline", y1: box.top, y2: box.bottom, x1: x(t), x2: x(t) }));
      group.append(svg("text", { x: x(t), y: box.bottom + 16, "text-anchor": "middle" }, format.x(t)));
    }
    const corner = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
    group.append(svg("rect", { class: "frame", ...corner }));
    group.append(svg("text", { x: box.right, y: box.bottom + 32, "text-anchor": "end" }, label));
    drawing.append(group);
  }

  // ------------------------------------------------------------------------------------ the charts

  function scaling() {
    const [place, width] = clear("scaling");
    const shown = rows.filter((r) => {
      const w = workloads.get(r.workload);
      const fits = w.op === state.op && rank(w) === state.model && w.axis !== "mix";
      return fits && timed(r) && !state.hidden.has(r.provider);
    });
    const point = (r) => ({ r, w: workloads.get(r.workload), x: workloads.get(r.workload).tokens });
    const points = shown.map(point);
    // one kind of size at a time: prompts where there are any, batches otherwise
    const axis = points.some((p) => p.w.axis === "length") ? "length" : "batch";
    const used = points.filter((p) => p.w.axis === axis);
    const height = Math.min(420, Math.max(260, width * 0.52));
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "time against size" });
    if (used.length) {
      const box = { left: 58, right: width - 12, top: 10, bottom: height - 40 };
      const xs = unique(used.map((p) => p.x)).sort((a, b) => a - b);
      const low = Math.min(...used.map((p) => Math.min(timed(p.r).p10_s, p.r.floor_s || Infinity)));
      const high = Math.max(...used.map((p) => timed(p.r).p90_s));
      const [left, right] = xs.length > 1 ? [xs[0] / 1.15, xs.at(-1) * 1.15] : [xs[0] / 2, xs[0] * 2];
      const x = logScale(left, right, box.left, box.right);
      const y = logScale(low / 1.3, high * 1.3, box.bottom, box.top);
      const wanted = xs.filter((v, n) => n === 0 || x(v) - x(xs[n - 1]) > 26 || n === xs.length - 1);
      const label = axis === "length" ? "tokens of one prompt" : "sequences";
      axes(drawing, box, wanted, ticks(low / 1.3, high * 1.3, 9), x, y, label, { x: String, y: duration });
      const floors = xs.map((v) => used.find((p) => p.x === v)).filter((p) => p.r.floor_s);
      const line = (list, value) => list.map((p, n) => `${n ? "L" : "M"}${x(p.x)} ${y(value(p))}`).join("");
      drawing.append(svg("path", { class: "floor", d: line(floors, (p) => p.r.floor_s) }));
      for (const name of providers) {
        const own = used.filter((p) => p.r.provider === name).sort((a, b) => a.x - b.x);
        const stroke = `stroke: ${colour(name)}; fill: none`;
        drawing.append(svg("path", { d: line(own, (p) => timed(p.r).median_s), style: stroke, "stroke-width": name === "sluice" ? 3 : 1.8 }));
        for (const p of own) {
          const ends = { x1: x(p.x), x2: x(p.x), y1: y(timed(p.r).p10_s), y2: y(timed(p.r).p90_s) };
          drawing.append(svg("line", { ...ends, style: stroke, "stroke-width": 1.2, opacity: 0.6 }));
          const dot = svg("circle", { cx: x(p.x), cy: y(timed(p.r).median_s), r: 5, style: `fill: ${colour(name)}` });
          drawing.append(explain(dot, about(p.r)));
        }
      }
    }
    finish(place, drawing, used.length);
  }

  function roofline() {
    const [place, width] = clear("roofline");
    const shown = rows.filter((r) => !state.hidden.has(r.provider) && chosen(workloads.get(r.workload).op));
    const height = Math.min(400, Math.max(280, width * 0.72));
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "roofline" });
    const points = shown.map((r) => {
      const w = workloads.get(r.workload);
      return { r, w, x: w.flops / w.bytes, y: w.flops / r.median_s };
    });
    if (points.length) {
      const copy = data.floors.copy.at(-1);
      const bandwidth = copy.bytes / copy.seconds;
      const peak = Math.max(...Object.values(data.floors.matrix_flops_per_s));
      const box = { left: 52, right: width - 12, top: 12, bottom: height - 40 };
      const low = Math.min(...points.map((p) => p.x)) / 1.6;
      const high = Math.max(...points.map((p) => p.x), (peak / bandwidth) * 1.5) * 1.6;
      const bottom = Math.min(...points.map((p) => p.y)) / 2;
      const top = Math.max(peak, ...points.map((p) => p.y)) * 2;
      const x = logScale(low, high, box.left, box.right);
      const y = logScale(bottom, top, box.bottom, box.top);
      axes(drawing, box, ticks(low, high, 6), ticks(bottom, top, 8), x, y, "operations for each byte moved", { x: short, y: (v) => `${short(v)}` });
      const roof = (v) => Math.max(bottom, Math.min(peak, v * bandwidth));
      const knee = Math.min(high, Math.max(low, peak / bandwidth));
      const start = Math.max(low, bottom / bandwidth);
      const d = `M${x(start)} ${y(roof(start))} L${x(knee)} ${y(roof(knee))} L${x(high)} ${y(peak)}`;
      drawing.append(svg("path", { class: "floor", d, "stroke-width": 2 }));
      drawing.append(svg("text", { x: box.right - 6, y: y(peak) - 6, "text-anchor": "end" }, `${short(peak)}FLOP/s`));
      const middle = Math.sqrt(start * knee);
      drawing.append(svg("text", { x: x(middle) - 10, y: y(roof(middle)) - 6, "text-anchor": "end" }, `${short(bandwidth)}B/s`));
      for (const p of points) {
        const spot = { cx: x(p.x), cy: y(p.y), r: p.r.provider === "sluice" ? 5.5 : 4 };
        const dot = svg("circle", { ...spot, style: `fill: ${colour(p.r.provider)}`, "fill-opacity": 0.75 });
        drawing.append(explain(dot, about(p.r)));
      }
    }
    finish(place, drawing, points.length);
  }

  // green above one, red below; deeper the further away, up to a factor of eight
  function shade(ratio) {
    const depth = Math.min(1, Math.abs(Math.log(ratio)) / Math.log(8));
    const tone = ratio >= 1 ? "var(--won)" : "var(--lost)";
    return `color-mix(in srgb, ${tone} ${Math.round(12 + 68 * depth)}%, var(--card))`;
  }
  function speedup(ratio) {
    const close = ratio < 0.1 || (ratio > 0.9 && ratio < 1.1); // where one digit would say nothing
    return `${ratio >= 9.95 ? ratio.toFixed(0) : ratio.toFixed(close ? 2 : 1)}×`;
  }

  function grid(id, columns, lines, value, labelWidth, least, name) {
    const [place, width] = clear(id);
    const cell = Math.max(least, Math.min(116, (width - labelWidth) / Math.max(1, columns.length)));
    // a heading of several words takes a line for each part of it
    const wide = (part) => part.length * 7 > cell - 4;
    const parts = columns.map((column) => column.split(/(?<=,) /).flatMap((part) => (wide(part) ? part.split(" ") : part)));
    const [tall, head] = [42, 26 + 14 * Math.max(1, ...parts.map((p) => p.length))];
    const [w, h] = [labelWidth + cell * columns.length, head + tall * lines.length + 4];
    const drawing = svg("svg", { viewBox: `0 0 ${w} ${h}`, height: h, role: "img", "aria-label": name });
    drawing.style.width = `${w}px`;
    place.classList.add("scroll");
    let marks = 0;
    columns.forEach((column, n) => {
      const fits = (part) => (wide(part) ? `${part.slice(0, Math.floor(cell / 7) - 2)}…` : part);
      const label = svg("text", { "text-anchor": "middle" });
      parts[n].forEach((part, m) => {
        const y = head - 12 - 14 * (parts[n].length - 1 - m);
        label.append(svg("tspan", { x: labelWidth + cell * (n + 0.5), y }, fits(part)));
      });
      label.append(svg("title", {}, column));
      drawing.append(label);
    });
    lines.forEach((line, m) => {
      drawing.append(svg("text", { x: labelWidth - 8, y: head + tall * (m + 0.5) + 4, "text-anchor": "end" }, line));
      columns.forEach((column, n) => {
        const found = value(line, column);
        const corner = { x: labelWidth + cell * n + 1.5, y: head + tall * m + 1.5, width: cell - 3, height: tall - 3, rx: 6 };
        if (!found) {
          drawing.append(svg("rect", { ...corner, style: "fill: var(--grid)", opacity: 0.5 }));
          return;
        }
        marks += 1;
        const box = svg("rect", { ...corner, style: `fill: ${shade(found.ratio)}` });
        if (found.low < 1) box.classList.add("losing");
        drawing.append(explain(box, found.text));
        const plain = { "text-anchor": "middle", "pointer-events": "none" };
        const spot = { x: corner.x + corner.width / 2, y: corner.y + corner.height / 2 + (found.range ? -2 : 4) };
        drawing.append(svg("text", { ...spot, ...plain }, speedup(found.ratio)));
        if (found.range) drawing.append(svg("text", { ...plain, x: spot.x, y: spot.y + 15, class: "range" }, found.range));
      });
    });
    finish(place, drawing, marks);
  }

  const ours = new Map(rows.filter((r) => r.provider === "sluice").map((r) => [r.workload, r]));
  // other libraries first, then other ways to call this one
  const variant = (name) => name.startsWith("sluice:");
  const others = providers.filter((n) => n !== "sluice");
  const peers = [...others.filter((n) => !variant(n)), ...others.filter(variant)];
  function pairs(test) {
    return rows.filter((r) => r.provider !== "sluice" && ours.has(r.workload) && test(r, workloads.get(r.workload)));
  }

  function glance() {
    const ops = allOps.filter(chosen);
    grid("glance", peers.map((n) => title[n]), ops, (op, column) => {
      const found = pairs((r, w) => w.op === op && title[r.provider] === column);
      if (!found.length) return null;
      const logs = found.map((r) => Math.log(r.median_s / ours.get(r.workload).median_s));
      const ratio = Math.exp(logs.reduce((a, b) => a + b, 0) / logs.length);
      const [low, high] = [Math.exp(Math.min(...logs)), Math.exp(Math.max(...logs))];
      const lost = found.filter((r) => r.median_s < ours.get(r.workload).median_s).length;
      const losses = lost ? `\nsluice is slower in ${lost} of them` : "";
      const range = found.length > 1 ? `${speedup(low)}–${speedup(high)}` : "";
      const text = `${op} against ${column}\n${found.length} workloads, from ${speedup(low)} to ${speedup(high)}${losses}`;
      return { ratio, low, range, text };
    }, 118, 72, "at a glance");
  }

  function heat() {
    const found = pairs((r, w) => w.op === state.heatOp && r.provider === state.peer);
    const byTokens = (a, b) => a.tokens - b.tokens || a.size.localeCompare(b.size);
    const used = found.map((r) => workloads.get(r.workload));
    const kind = (w) => [w.state_dtype === "bfloat16" ? "bf16" : w.state_dtype === "float32" ? "" : w.state_dtype, w.variant];
    const line = (w) => [w.heads.join("/"), ...kind(w)].filter(Boolean).join(" ");
    const columns = unique([...used].sort(byTokens).map((w) => w.label));
    const lines = unique([...used].sort((a, b) => a.heads[1] - b.heads[1]).map(line));
    grid("heat", columns, lines, (heads, size) => {
      const r = found.find((x) => line(workloads.get(x.workload)) === heads && workloads.get(x.workload).label === size);
      if (!r) return null;
      const mine = ours.get(r.workload);
      return { ratio: r.median_s / mine.median_s, text: `${about(r)}\n\n${about(mine)}` };
    }, 76, 56, "speed-up over heads and sizes");
  }

  function cold() {
    const [place, width] = clear("cold");
    const bars = data.first_calls;
    place.closest("section").hidden = !bars.length;
    const [tall, label] = [26, Math.min(190, width * 0.42)];
    const height = bars.length * tall + 8;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "cold start" });
    const most = Math.max(1e-9, ...bars.map((b) => (b.import_s || 0) + b.call_s));
    const scale = (width - label - 78) / most;
    bars.forEach((b, n) => {
      const y = n * tall + 4;
      const [first, second] = [(b.import_s || 0) * scale, Math.max(1.5, b.call_s * scale)];
      drawing.append(svg("text", { x: label - 8, y: y + 14, "text-anchor": "end" }, `${title[b.provider] || b.provider}, ${b.op}`));
      const shape = { y, height: tall - 8, rx: 3, style: `fill: ${colour(b.provider)}` };
      if (first) drawing.append(svg("rect", { ...shape, x: label, width: first, opacity: 0.4 }));
      const text = `${title[b.provider] || b.provider}, ${b.workload}\nimport ${duration(b.import_s || 0)}, first call ${duration(b.call_s)}`;
      drawing.append(explain(svg("rect", { ...shape, x: label + first, width: second }), text));
      drawing.append(svg("text", { x: label + first + second + 6, y: y + 14 }, duration((b.import_s || 0) + b.call_s)));
    });
    finish(place, drawing, bars.length);
  }

  // ---------------------------------------------------------------------------------- the controls

  function buttons(place, values, pressed, choose) {
    place.replaceChildren(...values.map((value) => {
      const node = html("button", { type: "button", "aria-pressed": String(pressed(value)) });
      node.append(value);
      node.addEventListener("click", () => choose(value));
      return node;
    }));
  }
  function options(node, values, names, chosen, choose) {
    node.replaceChildren(...values.map((v) => {
      const option = html("option", { value: v }, names(v));
      option.selected = v === chosen;
      return option;
    }));
    node.onchange = () => choose(node.value);
    node.hidden = values.length < 2;
  }
  function controls() {
    const drawable = rows.map((r) => workloads.get(r.workload)).filter((w) => w.axis !== "mix");
    const ops = unique(drawable.map((w) => w.op)).filter(chosen);
    state.op = ops.includes(state.op) ? state.op : ops[0];
    buttons($("pick-op"), ops, (op) => op === state.op, (op) => { state.op = op; draw(); });
    const models = unique(drawable.filter((w) => w.op === state.op).map(rank));
    state.model = models.includes(state.model) ? state.model : models[0];
    options($("pick-model"), models, String, state.model, (v) => { state.model = v; draw(); });
    const heatOps = unique(pairs(() => true).map((r) => workloads.get(r.workload).op)).filter(chosen);
    state.heatOp = heatOps.includes(state.heatOp) ? state.heatOp : heatOps.includes("prefill") ? "prefill" : heatOps[0];
    options($("pick-heat-op"), heatOps, String, state.heatOp, (v) => { state.heatOp = v; draw(); });
    const against = peers.filter((n) => pairs((r, w) => w.op === state.heatOp && r.provider === n).length);
    const first = against.find((n) => !n.startsWith("sluice:")) || against[0];
    state.peer = against.includes(state.peer) ? state.peer : first;
    options($("pick-peer"), against, (n) => title[n], state.peer, (v) => { state.peer = v; draw(); });
    const kinds = ["all", ...allOps];
    for (const place of ["only", "pick-rows"]) {
      buttons($(place), kinds, (op) => op === state.only, (op) => { location.hash = op === "all" ? "" : op; pick(op); });
    }
    $("only").hidden = allOps.length < 2;
    const times = hasEager ? ["graph", "eager"] : ["graph"];
    const kind = { graph: "replayed graphs: kernels alone", eager: "eager calls: by the wall clock" };
    options($("pick-time"), times, (v) => kind[v], state.time, (v) => { state.time = v; draw(); });
    $("legend").replaceChildren(...providers.map((name) => {
      const swatch = html("span", { class: "swatch", style: `background: ${colour(name)}` });
      const node = html("button", { type: "button", "aria-pressed": String(!state.hidden.has(name)) }, swatch, title[name]);
      node.addEventListener("click", () => {
        if (!state.hidden.delete(name)) state.hidden.add(name);
        draw();
      });
      return node;
    }));
  }

  // one operator alone, everywhere on the page; the address keeps it
  function pick(op) {
    state.only = allOps.includes(op) ? op : "all";
    document.body.dataset.only = state.only;
    draw();
    document.dispatchEvent(new CustomEvent("only"));
  }

  function draw() {
    controls();
    for (const chart of [glance, scaling, roofline, heat, cold]) chart();
    document.body.dataset.ready = "yes";
  }

  window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });
  let pending = 0;
  let last = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === last) return; // a phone's address bar changes the height only
    last = window.innerWidth;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(draw);
  });
  window.addEventListener("hashchange", () => pick(location.hash.slice(1)));
  pick(location.hash.slice(1));
})();
