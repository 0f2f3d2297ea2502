// The page: totals, labels and details as elements, the pictures on canvases, one time axis for all runs.

const data = JSON.parse(document.getElementById("data").textContent);
const END = largest(1e-3, data.runs.map((run) => [run.totals.wall_s * 1000, run.forwards.map((each) => each[2])]));
const HOME = { from: -0.01 * END, to: 1.02 * END };
const state = {
  ...HOME, end: END, colours: null, lane: null, sample: null, run: null, block: null, round: null, wait: null,
  lastStep: largest(0, data.runs.map((run) => run.lanes.map((lane) => lane.blocks.map((block) => block.tokens.map((token) => token[1]))))),
};
const expanded = new Set(); // lanes, by their place in every run
const views = []; // of each run: its layout, drawing and elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Elements -----------------------------------------------------------------------------------------------------------

function buildHeader() {
  const [first] = data.runs;
  document.title = `fdfo trace: ${data.title}`;
  document.getElementById("title").textContent = data.title;
  document.getElementById("headline").append(...headline());
  document.getElementById("notes").append(...data.runs.flatMap((run) => run.notes.map((note) => make("p", {}, `${run.name}: ${note}`))));
  if (!first) throw new Error("a page without a run");
}

function headline() {
  if (data.runs.length < 2) return [`${data.runs[0].lanes.length} answers. A block of ${data.runs[0].blockSize} tokens fills up from left to right.`];
  const [one, other] = data.runs.map((run) => run.totals);
  const strong = (value) => make("b", {}, value);
  return [
    "For the same prompts, ", data.runs[0].name, " took ", strong(`${ratio(one.wall_s, other.wall_s)} of the time`), " and ",
    strong(`${ratio(one.forwards, other.forwards)} of the forwards`), ` of ${data.runs[1].name}; `,
    strong(`${one.wasted_row_forwards} against ${other.wasted_row_forwards}`), " row-forwards waited for a slower neighbour.",
  ];
}

function ratio(one, other) {
  return other ? `${Math.round((100 * one) / other)} %` : "-";
}

function buildTotals() {
  const table = document.getElementById("totals"), two = data.runs.length === 2;
  const head = make("tr", {}, make("th"), ...data.runs.map((run) => make("th", {}, run.name)));
  if (two) head.append(make("th", {}, "ratio"));
  table.append(head);
  for (const total of data.totals) {
    const values = data.runs.map((run) => run.totals[total.name]);
    const cells = values.map((value, index) =>
      make("td", { "data-run": data.runs[index].name, "data-total": total.name, "data-value": value }, show(value, total)));
    const row = make("tr", {}, make("td", { title: total.meaning }, total.label), ...cells);
    if (two) row.append(make("td", { class: "ratio" }, values[1] ? (values[0] / values[1]).toFixed(2) : "-"));
    table.append(row);
  }
}

function show(value, total) {
  const text = value.toLocaleString("en", { minimumFractionDigits: total.digits, maximumFractionDigits: total.digits });
  return total.unit ? `${text} ${total.unit}` : text;
}

function buildRuns() {
  for (const run of data.runs) {
    const facts = Object.entries(run.facts).map(([name, value]) => `${name} ${value}`).join(" · ");
    const canvas = make("canvas", { role: "img", "aria-label": `${run.name}: a lane for each answer, time to the right` });
    const cursor = make("div", { class: "cursor" }, make("span"));
    const plot = make("div", { class: "plot" }, canvas, cursor);
    const labels = make("ol", { class: "labels", "data-run": run.name, "data-rounds": run.rounds.length, "data-forwards": run.forwards.length });
    const card = make("article", { class: "run" }, make("h2", {}, run.name, make("small", {}, facts)), make("div", { class: "chart" }, labels, plot));
    document.getElementById("runs").append(card);
    const view = { run, labels, plot, cursor, drawing: new Drawing(run, canvas, state), layout: null };
    views.push(view);
    listen(view);
  }
}

function buildLabels(view) {
  view.layout = layOut(view.run, expanded);
  view.labels.replaceChildren(...view.layout.tracks.map((track) => {
    if (track.kind !== "lane") return make("li", { class: "track", style: `height:${track.height}px` }, trackName(track, view.run));
    const lane = view.run.lanes[track.lane], count = (name) => lane[name].length;
    const named = lane.sample ? `${lane.number + 1}.${lane.sample + 1}` : `${lane.number + 1}`;
    const classes = ["lane", expanded.has(track.lane) && "expanded", lane.failed && "failed", isSelected(lane) && "selected"];
    return make(
      "li",
      {
        class: classes.filter(Boolean).join(" "), style: `height:${track.height}px`, title: lane.prompt, tabindex: 0,
        "data-request": lane.request, "data-sample": lane.sample, "data-blocks": count("blocks"), "data-tokens": lane.tokens,
        "data-waits": lane.waits.reduce((sum, wait) => sum + wait.forwards, 0),
        "data-steps": lane.blocks.reduce((sum, block) => sum + block.steps.length, 0),
        onclick: () => toggle(track.lane), onfocus: () => select(view.run, lane, null), onmouseenter: () => select(view.run, lane, null),
      },
      make("b", {}, named), make("bdi", {}, lane.prompt));
  }));
}

function trackName(track, run) {
  const which = run.workers.length > 1 && track.worker !== undefined ? ` of ${run.workers[track.worker]}` : "";
  return { axis: "", rounds: `rounds${which}`, device: `rows in forwards${which}` }[track.kind];
}

function isSelected(lane) {
  return state.lane === lane.number && state.sample === lane.sample;
}

function buildLegend() {
  const count = state.lastStep + 1, shown = Math.min(count, 12), legend = document.getElementById("legend");
  const cells = Array.from({ length: shown }, (_, index) => {
    const step = shown > 1 ? Math.round((index * state.lastStep) / (shown - 1)) : 0;
    return make("i", { style: `background: rgb(${stepColour(state.colours, step, state.lastStep)})` }, String(step));
  });
  const key = (text, paint) => {
    const canvas = make("canvas", { width: 52, height: 28 }), context = canvas.getContext("2d");
    context.scale(2, 2);
    paint(context, (colour) => { context.fillStyle = colour; context.fillRect(0, 0, 26, 14); });
    return make("div", { class: "key" }, canvas, make("span", {}, text));
  };
  const { colours } = state, first = stepColour(colours, 0, 1);
  legend.replaceChildren(
    make("div", {}, "step of its block that set a token"), make("div", { class: "ramp" }, ...cells),
    key("set in this forward, and set before", (context, fill) => {
      fill(`rgba(${first}, ${KEPT})`);
      context.fillStyle = `rgb(${first})`;
      context.fillRect(0, 0, 13, 14);
    }),
    key("still masked, or not part of the answer", (context, fill) => fill(colours.mask)),
    key("prompt in the block", (context, fill) => { fill(colours.mask); fill(hatch(context, colours["line-strong"])); }),
    key("done, but waits for the slowest row", (context, fill) => fill(hatch(context, colours.waste))),
    key("device idle", (context, fill) => { context.globalAlpha = 0.28; fill(colours.waste); }),
    key("rows that denoise in a forward", (context, fill) => fill(colours.device)),
  );
}

// What the user does -------------------------------------------------------------------------------------------------

let isDrawing = false;
function redraw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const view of views) view.drawing.draw(view.layout);
  });
}

function rebuild() {
  for (const view of views) buildLabels(view);
  redraw();
}

function select(run, lane, block, more = {}) {
  Object.assign(state, { run, lane: lane ? lane.number : null, sample: lane ? lane.sample : null, block, round: null, wait: null }, more);
  for (const view of views) {
    for (const label of view.labels.querySelectorAll(".lane")) {
      const is = lane && label.dataset.request === view.run.lanes.find(isSelected)?.request && Number(label.dataset.sample) === lane.sample;
      label.classList.toggle("selected", Boolean(is));
    }
  }
  buildDetails();
  redraw();
}

function toggle(place) {
  if (!expanded.delete(place)) expanded.add(place);
  rebuild();
}

function setRange(from, to) {
  const all = HOME.to - HOME.from, size = Math.min(Math.max(to - from, all / 1e5), all);
  state.from = Math.min(Math.max((from + to - size) / 2, HOME.from), HOME.to - size);
  state.to = state.from + size;
  redraw();
}

function zoom(factor, at = (state.from + state.to) / 2) {
  setRange(at + (state.from - at) * factor, at + (state.to - at) * factor);
}

function pan(share) {
  const by = share * (state.to - state.from);
  setRange(state.from + by, state.to + by);
}

// What is under a point of a plot.
function find(view, x, y) {
  const { run, layout, drawing } = view, at = drawing.ms(x), near = 2 / drawing.perMs();
  const track = layout.tracks.find((each) => y >= each.top && y < each.top + each.height);
  const holds = ([from, to]) => at >= from - near && at <= to + near;
  if (track && (track.kind === "rounds" || track.kind === "device")) {
    const inside = run.rounds.filter((round) => round.worker === track.worker && holds(round.span));
    const level = Math.floor((y - track.top - 3) / (ROUND_PX + 2));
    const ran = inside.find((round) => run.forwards.slice(...round.forwards).some((each) => at >= each[1] && at <= each[2]));
    const round = track.kind === "device" ? ran : inside.find((each) => each.level === level);
    return select(run, null, null, { round: round ?? null });
  }
  if (!track || track.kind !== "lane") return select(null, null, null);
  const lane = run.lanes[track.lane], wait = lane.waits.find((each) => at >= each.span[0] && at <= each.span[1]);
  const block = lane.blocks.find((each) => at >= each.span[0] && at <= each.span[1]) ?? (wait ? null : lane.blocks.find((each) => holds(each.span)));
  select(run, lane, block ?? null, { wait: !block && wait ? { run, wait } : null });
}

function listen(view) {
  const { plot } = view;
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let start = null;
  plot.addEventListener("pointerdown", (event) => {
    start = { x: event.clientX, from: state.from, to: state.to, moved: false };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    const [x, y] = point(event);
    if (start && Math.abs(event.clientX - start.x) > 3) start.moved = true;
    if (start?.moved) {
      const by = ((start.x - event.clientX) / view.drawing.width) * (start.to - start.from);
      plot.classList.add("panning");
      setRange(start.from + by, start.to + by);
    } else {
      find(view, x, y);
    }
    showCursor(view.drawing.ms(x));
  });
  plot.addEventListener("pointerup", (event) => {
    const track = view.layout.tracks.find((each) => point(event)[1] >= each.top && point(event)[1] < each.top + each.height);
    if (start && !start.moved && event.detail < 2 && track?.kind === "lane") toggle(track.lane);
    start = null;
    plot.classList.remove("panning");
  });
  plot.addEventListener("pointerleave", () => {
    showCursor(null);
    select(null, null, null);
  });
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), view.drawing.ms(point(event)[0]));
    else pan(event.deltaX / view.drawing.width);
  }, { passive: false });
}

// One line at the same time in all runs.
function showCursor(ms) {
  for (const { cursor, drawing } of views) {
    const x = ms === null ? -1 : drawing.x(ms);
    cursor.style.display = x >= 0 && x <= drawing.width ? "block" : "none";
    cursor.style.left = `${x}px`;
    cursor.classList.toggle("left", x > drawing.width - 80);
    if (ms !== null) cursor.firstChild.textContent = formatMs(ms, (state.to - state.from) / 1000);
  }
}

function stepBlock(by) {
  const run = state.run ?? data.runs[0], lane = run.lanes.find(isSelected) ?? run.lanes[0];
  if (!lane) return;
  const place = lane.blocks.indexOf(state.block) + by;
  const block = lane.blocks[Math.min(Math.max(place, 0), lane.blocks.length - 1)];
  select(run, lane, block ?? null);
  if (block && (block.span[0] < state.from || block.span[1] > state.to)) setRange(block.span[0] - (state.to - state.from) / 2, block.span[0] + (state.to - state.from) / 2);
}

function stepLane(by) {
  const lanes = views.flatMap((view) => [...view.labels.querySelectorAll(".lane")]);
  const place = lanes.indexOf(document.activeElement) + by;
  lanes[Math.min(Math.max(place, 0), lanes.length - 1)]?.focus();
}

// trace.html#1/0/2 points at run 1, its lane 0 and the lane's block 2, all counted from 0.
function selectByAddress() {
  const [run, lane, block] = location.hash.slice(1).split("/").map(Number), at = data.runs[run];
  if (at?.lanes[lane]) select(at, at.lanes[lane], at.lanes[lane].blocks[block] ?? null);
}

const ROOT = document.documentElement;
function changeTheme() {
  const isDark = ROOT.dataset.theme ? ROOT.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  ROOT.dataset.theme = isDark ? "light" : "dark";
  takeColours();
}

function takeColours() {
  state.colours = readColours();
  buildLegend();
  buildDetails();
  redraw();
}

const KEYS = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => setRange(HOME.from, HOME.to),
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => stepLane(-1), ArrowDown: () => stepLane(1),
  ",": () => stepBlock(-1), ".": () => stepBlock(1), t: changeTheme, Escape: () => select(null, null, null),
  Enter: () => document.activeElement?.classList.contains("lane") && document.activeElement.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  if (event.key === "Enter" && !document.activeElement?.classList.contains("lane")) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const [id, act] of Object.entries({ "zoom-in": KEYS["+"], "zoom-out": KEYS["-"], fit: KEYS["0"], theme: changeTheme })) {
  document.getElementById(id).addEventListener("click", act);
}
document.addEventListener("dblclick", (event) => {
  const view = views.find((each) => each.plot.contains(event.target));
  if (view) zoom(0.5, view.drawing.ms(event.clientX - view.plot.getBoundingClientRect().left));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", takeColours);
addEventListener("resize", redraw);
addEventListener("hashchange", selectByAddress);

buildHeader();
buildTotals();
buildRuns();
for (const view of views) buildLabels(view);
takeColours();
selectByAddress();
