"use strict";
// What is drawn of one run, on one canvas: a time axis, rounds, device, and a lane per sample. Times are milliseconds.

const AXIS_PX = 24, ROUND_PX = 8, DEVICE_PX = 40, LANE_PX = 24, TOKEN_PX = 14, GAP_PX = 3, KEPT = 0.6;
const LABEL_FONT = "11px system-ui, sans-serif", TOKEN_FONT = "10.5px ui-monospace, Menlo, Consolas, monospace";

// The largest value of nested arrays, or `least`. (Math.max(...values) fails where there are more than the stack holds.)
function largest(least, values) {
  return values.reduce((most, value) => Math.max(most, Array.isArray(value) ? largest(least, value) : value), least);
}

// The page's colours, as the scheme that is in force has them.
function readColours() {
  const probe = document.body.appendChild(document.createElement("i"));
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["card", "line", "line-strong", "text", "muted", "mask", "prompt", "device", "round", "waste", "select", "on-step"];
  const colours = Object.fromEntries(names.map((name) => [name, read(name)]));
  colours.ramp = [0, 1, 2, 3, 4, 5].map((number) => read(`step-${number}`).match(/[\d.]+/g).slice(0, 3).map(Number));
  probe.remove();
  return colours;
}

// The colour of a step among steps 0 to `last`, as "r, g, b".
function stepColour(colours, step, last) {
  const place = (last > 0 ? Math.min(step / last, 1) : 0) * (colours.ramp.length - 1);
  const low = Math.min(Math.floor(place), colours.ramp.length - 2), share = place - low;
  return colours.ramp[low].map((part, index) => Math.round(part + share * (colours.ramp[low + 1][index] - part))).join(", ");
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 12;
  const on = tile.getContext("2d");
  on.strokeStyle = colour;
  on.lineWidth = 2;
  for (const shift of [-12, 0, 12]) {
    on.beginPath();
    on.moveTo(shift, 12);
    on.lineTo(shift + 12, 0);
    on.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

// Where the tracks of a run lie: rows of {kind, top, height, worker or lane}, and the height of all.
function layOut(run, expanded) {
  const tracks = [{ kind: "axis", top: 0, height: AXIS_PX }];
  let top = AXIS_PX;
  run.workers.forEach((name, worker) => {
    const levels = 1 + largest(0, run.rounds.map((round) => (round.worker === worker ? round.level : 0)));
    for (const [kind, height] of [["rounds", levels * (ROUND_PX + 2) + 6], ["device", DEVICE_PX]]) {
      tracks.push({ kind, worker, top, height });
      top += height;
    }
    top += 6;
  });
  run.lanes.forEach((lane, index) => {
    const height = (expanded.has(index) ? run.blockSize * TOKEN_PX : LANE_PX) + GAP_PX;
    tracks.push({ kind: "lane", lane: index, top, height });
    top += height;
  });
  return { tracks, height: top + 6 };
}

class Drawing {
  constructor(run, canvas, state) {
    Object.assign(this, { run, canvas, state, context: canvas.getContext("2d") });
  }

  x(ms) {
    return ((ms - this.state.from) / (this.state.to - this.state.from)) * this.width;
  }

  ms(x) {
    return this.state.from + (x / this.width) * (this.state.to - this.state.from);
  }

  draw(layout) {
    const { canvas, context, state } = this, scale = window.devicePixelRatio || 1;
    this.width = canvas.parentElement.clientWidth;
    canvas.width = Math.round(this.width * scale);
    canvas.height = Math.round(layout.height * scale);
    canvas.style.height = `${layout.height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.colours = state.colours;
    this.wasteHatch = hatch(context, this.colours.waste);
    this.promptHatch = hatch(context, this.colours["line-strong"]);
    context.textBaseline = "middle";
    this.drawAxis(layout, this.endLabel());
    for (const track of layout.tracks) {
      if (track.kind === "rounds") this.drawRounds(track);
      if (track.kind === "device") this.drawDevice(track);
      if (track.kind === "lane") this.drawLane(track);
    }
    this.drawEnd(layout);
    if (state.wait && state.wait.run === this.run) this.drawWaitedFor(layout, state.wait.wait);
  }

  bar(from, to, top, height, fill) {
    const left = Math.max(this.x(from), -20), right = Math.min(this.x(to), this.width + 20);
    if (right <= left) return 0;
    this.context.fillStyle = fill;
    this.context.fillRect(left, top, Math.max(right - left, 0.4), height);
    return right - left;
  }

  label(text, from, to, middle, colour, font = LABEL_FONT) {
    const { context } = this, left = Math.max(this.x(from), 0) + 4, room = Math.min(this.x(to), this.width) - left - 2;
    context.font = font;
    if (room < 8 || context.measureText(text).width > room) return false;
    context.fillStyle = colour;
    context.fillText(text, left, middle);
    return true;
  }

  // What is said at the end of the run, and where: no tick of the axis is named there.
  endLabel() {
    const { context, run } = this, end = run.totals.wall_s * 1000, x = this.x(end), text = `all done ${formatMs(end, end / 200)}`;
    context.font = "600 " + LABEL_FONT;
    const width = context.measureText(text).width, left = x + 5 + width < this.width ? x + 5 : x - 5 - width;
    return { end, x, text, left, right: left + width };
  }

  drawAxis(layout, taken) {
    const { context, colours, state } = this, raw = ((state.to - state.from) / this.width) * 90;
    const power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((part) => part * power).find((size) => size >= raw);
    context.font = LABEL_FONT;
    for (let at = Math.ceil(state.from / step) * step; at <= state.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5, text = formatMs(at, step);
      context.strokeStyle = colours.line;
      context.beginPath();
      context.moveTo(x, AXIS_PX - 5);
      context.lineTo(x, layout.height);
      context.stroke();
      context.fillStyle = colours.muted;
      const right = x + 4 + context.measureText(text).width;
      if (right < this.width && (right < taken.left - 6 || x > taken.right)) context.fillText(text, x + 4, AXIS_PX / 2);
    }
  }

  drawRounds(track) {
    for (const round of this.run.rounds) {
      if (round.worker !== track.worker || round.span[1] < this.state.from || round.span[0] > this.state.to) continue;
      const top = track.top + 3 + round.level * (ROUND_PX + 2), is = this.state.round === round;
      this.bar(round.span[0], round.span[1], top, ROUND_PX, is ? this.colours.text : this.colours.round);
      this.bar(round.span[0], round.span[0] + 1.5 / this.perMs(), top, ROUND_PX, this.colours.card);
    }
  }

  perMs() {
    return this.width / (this.state.to - this.state.from);
  }

  // A bar a forward, as high as the rows in it; where no forward runs the ground shows the colour of waste.
  drawDevice(track) {
    const { context, colours, run } = this, height = track.height - 8, bottom = track.top + track.height - 4;
    context.globalAlpha = 0.28;
    for (const [from, to] of run.idle[track.worker] || []) this.bar(from, to, track.top + 4, height, colours.waste);
    context.globalAlpha = 1;
    const most = largest(run.maxRows, run.forwards.map((forward) => forward[3] + forward[4]));
    for (const [worker, from, to, active, waiting] of run.forwards) {
      if (worker !== track.worker || to < this.state.from || from > this.state.to) continue;
      const activePx = (active / most) * height, waitingPx = (waiting / most) * height;
      this.bar(from, to, track.top + 4, height, colours.mask);
      this.bar(from, to, bottom - activePx, activePx, colours.device);
      if (waiting) this.bar(from, to, bottom - activePx - waitingPx, waitingPx, this.wasteHatch);
    }
  }

  drawLane(track) {
    const { context, colours, run, state } = this, lane = run.lanes[track.lane], height = track.height - GAP_PX;
    const top = track.top, middle = top + Math.min(height, LANE_PX) / 2, isOpen = height > LANE_PX;
    if (state.lane === lane.number && state.sample === lane.sample) this.fillRow(top - 1, track.height, colours.select);
    const until = lane.started ?? lane.ended ?? state.end;
    context.setLineDash([2, 3]);
    this.rule(lane.sent, until, middle, colours["line-strong"]);
    context.setLineDash([]);
    this.rule(until, lane.ended ?? state.end, middle, colours["line-strong"]);
    this.label("queued", lane.sent, until, middle - 7, colours.muted, "10px system-ui, sans-serif");
    for (const [from, to] of lane.prefills) this.bar(from, to, middle - 4, 8, colours.round);
    for (const block of lane.blocks) this.drawBlock(block, lane, top, height, isOpen);
    for (const wait of lane.waits) this.drawWait(wait, top, Math.min(height, LANE_PX));
    if (lane.ended !== null) {
      context.fillStyle = lane.failed ? colours.waste : colours.muted;
      context.beginPath();
      context.arc(this.x(lane.ended), middle, 2.5, 0, 7);
      context.fill();
    }
  }

  fillRow(top, height, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(0, top, this.width, height);
  }

  rule(from, to, y, colour) {
    const { context } = this;
    context.strokeStyle = colour;
    context.beginPath();
    context.moveTo(Math.max(this.x(from), 0), Math.round(y) + 0.5);
    context.lineTo(Math.min(this.x(to), this.width), Math.round(y) + 0.5);
    context.stroke();
  }

  // Time to the right, the block's positions downwards. A position is pale until the forward that sets its token, bright
  // in that forward, and keeps its colour after it.
  drawBlock(block, lane, top, height, isOpen) {
    const [from, to] = block.span, { state, colours, context, run } = this;
    if (to < state.from || from > state.to) return;
    const cell = height / run.blockSize, inner = isOpen ? 1 : 0;
    this.bar(from, to, top, height, colours.mask);
    const prompt = Math.min(Math.max(lane.promptTokens - block.index * run.blockSize, 0), run.blockSize);
    if (prompt) this.bar(from, to, top, prompt * cell, this.promptHatch);
    for (const [offset, step, text] of block.tokens) {
      const rgb = stepColour(colours, step, state.lastStep), y = top + offset * cell;
      const begin = block.steps[step][0], next = step + 1 < block.steps.length ? Math.min(block.steps[step + 1][0], to) : to;
      this.bar(next, to, y, cell - inner, `rgba(${rgb}, ${isOpen ? 0.8 : KEPT})`);
      this.bar(begin, next, y, cell - inner, `rgb(${rgb})`);
      if (isOpen) this.label(shownToken(text), begin, to, y + cell / 2, colours["on-step"], TOKEN_FONT);
    }
    this.drawSeams(block, top, height);
    if (state.block === block) {
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(this.x(from), top, this.x(to) - this.x(from), height);
      context.lineWidth = 1;
    }
    this.bar(to - 1.2 / this.perMs(), to, top, height, block.done ? colours.text : colours.waste);
  }

  // Between two forwards, where there is room for it.
  drawSeams(block, top, height) {
    const perMs = this.perMs(), [from, to] = block.span;
    if ((to - from) * perMs < 7 * block.steps.length) return;
    for (const [begin] of block.steps) {
      if (begin > from && begin < to) this.bar(begin - 0.5 / perMs, begin + 0.5 / perMs, top, height, this.colours.card);
    }
  }

  drawWait(wait, top, height) {
    const [from, to] = wait.span, { colours, context } = this;
    if (!this.bar(from, to, top + 5, height - 10, this.wasteHatch)) return;
    const text = `waits ${formatMs(to - from, (to - from) / 20)}`;
    context.font = LABEL_FONT;
    const width = context.measureText(text).width + 6, left = Math.max(this.x(from), 0) + 4;
    if (left + width + 4 < this.x(to)) {
      context.fillStyle = colours.card;
      context.fillRect(left, top + 7, width, height - 14);
      context.fillStyle = colours.waste;
      context.fillText(text, left + 3, top + height / 2);
    }
  }

  // From a wait to the rows that end last.
  drawWaitedFor(layout, wait) {
    const { context, colours } = this, x = this.x(wait.span[1]);
    context.strokeStyle = colours.waste;
    context.lineWidth = 1.5;
    for (const track of layout.tracks.filter((each) => wait.for.includes(each.lane))) {
      const left = this.x(wait.span[0]);
      context.strokeRect(left, track.top - 1, x - left, Math.min(track.height, LANE_PX + GAP_PX) - 1);
    }
    context.beginPath();
    context.moveTo(x, AXIS_PX);
    context.lineTo(x, layout.height);
    context.stroke();
    context.lineWidth = 1;
  }

  drawEnd(layout) {
    const { context, colours, state } = this, { end, x, text, left } = this.endLabel();
    if (x < 0 || x > this.width) return;
    context.globalAlpha = 0.6;
    this.bar(end, state.to, AXIS_PX, layout.height - AXIS_PX, colours.card);
    context.globalAlpha = 1;
    context.fillStyle = colours.text;
    context.fillRect(x, AXIS_PX - 6, 1, layout.height - AXIS_PX);
    context.font = "600 " + LABEL_FONT;
    context.fillStyle = colours.text;
    context.fillText(text, left, AXIS_PX / 2);
  }
}

// White space on its own can be seen.
function shownToken(text) {
  return text.trim() ? text : text.replaceAll(" ", "␣").replaceAll("\n", "⏎");
}

// A time with as many digits as steps of `step` ms need.
function formatMs(ms, step) {
  if (Math.abs(ms) >= 10000 && step >= 10) return `${(ms / 1000).toFixed(step >= 1000 ? 0 : step >= 100 ? 1 : 2)} s`;
  return `${ms.toFixed(step >= 1 ? 0 : step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3)} ms`;
}
