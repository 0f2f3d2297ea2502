// What is said of the thing that is pointed at: an answer, a block, a wait or a round.

function buildDetails() {
  const details = document.getElementById("details"), { run, block, round, wait } = state;
  const lane = run && run.lanes.find(isSelected);
  if (round) details.replaceChildren(...roundDetails(run, round));
  else if (lane && wait) details.replaceChildren(...waitDetails(run, lane, wait.wait));
  else if (lane && block) details.replaceChildren(...blockDetails(run, lane, block));
  else if (lane) details.replaceChildren(...laneDetails(run, lane));
  else details.replaceChildren(make("h2", {}, "Details"), ...help());
}

function help() {
  const keys = [["drag, ← →", "move"], ["Ctrl+wheel, + −", "zoom"], ["double click, 0", "zoom in, all"], ["↑ ↓", "lanes"],
    [", .", "blocks"], ["click, Enter", "open a lane: its tokens"], ["t", "light or dark"]];
  return [
    make("p", { class: "muted" }, "Point at a block, a wait, a round or a label."),
    make("dl", {}, ...keys.flatMap(([key, text]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, text)])),
  ];
}

function listOf(pairs) {
  return make("dl", {}, ...pairs.filter(Boolean).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function exact(ms) {
  return formatMs(ms, ms >= 1000 ? 1 : 0.1);
}

function laneTitle(run, lane, what) {
  return make("h2", {}, `${run.name} · answer ${lane.number + 1}${lane.sample ? `.${lane.sample + 1}` : ""}${what}`);
}

function laneDetails(run, lane) {
  const waited = lane.waits.reduce((sum, wait) => sum + wait.span[1] - wait.span[0], 0);
  return [
    laneTitle(run, lane, ""), make("p", {}, make("bdi", {}, lane.prompt)), make("p", { class: "muted" }, make("bdi", {}, lane.text.trim())),
    listOf([
      ["queued", lane.started === null ? "never started" : exact(lane.started - lane.sent)],
      lane.firstText !== null && ["first text", exact(lane.firstText - lane.sent)],
      lane.ended !== null && ["answer", exact(lane.ended - lane.sent)],
      ["tokens", `${lane.tokens} in ${lane.blocks.length} blocks`],
      waited > 0 && ["waited", `${exact(waited)} for slower rows`],
      ["ended by", lane.reason || "nothing: it is cut off"],
    ]),
  ];
}

function blockDetails(run, lane, block) {
  const tokens = new Map(block.tokens.map((token) => [token[0], token])), first = block.index * run.blockSize;
  const cells = Array.from({ length: run.blockSize }, (_, offset) => {
    const token = tokens.get(offset);
    if (!token) return make("i", { class: first + offset < lane.promptTokens ? "prompt" : "", title: first + offset < lane.promptTokens ? "prompt" : "not part of the answer" }, "");
    const rgb = stepColour(state.colours, token[1], state.lastStep);
    return make("i", { style: `background: rgb(${rgb}); color: var(--on-step)`, title: `step ${token[1]}, position ${first + offset}` }, shownToken(token[2]));
  });
  return [
    laneTitle(run, lane, `, block ${block.index}`),
    listOf([
      ["time", `${exact(block.span[0])} to ${exact(block.span[1])}`],
      ["forwards", `${block.steps.length}${block.fused ? ", the last shared with the next block" : ""}`],
      ["tokens", `${block.tokens.length} of the answer${block.done ? "" : "; never done"}`],
    ]),
    make("div", { class: "grid" }, ...cells),
  ];
}

function waitDetails(run, lane, wait) {
  const slowest = wait.for.map((place) => make("p", {}, `${run.lanes[place].number + 1} · `, make("bdi", {}, run.lanes[place].prompt)));
  return [
    laneTitle(run, lane, " waits"),
    listOf([["time", exact(wait.span[1] - wait.span[0])], ["forwards", `${wait.forwards} in which it keeps its place`]]),
    make("p", { class: "muted" }, "It is done; its round ends with:"), ...slowest,
  ];
}

function roundDetails(run, round) {
  const forwards = run.forwards.slice(...round.forwards), device = forwards.reduce((sum, each) => sum + each[2] - each[1], 0);
  const sum = (index) => forwards.reduce((all, each) => all + each[index], 0);
  return [
    make("h2", {}, `${run.name} · round ${round.id}`),
    listOf([
      ["worker", run.workers[round.worker]], ["sent", exact(round.span[0])], ["reply", `${exact(round.span[1] - round.span[0])} later`],
      ["rows", `${round.rows}${round.others ? ` and ${round.others} of others` : ""}`], ["forwards", String(forwards.length)],
      ["device", exact(device)], ["row-forwards", `${sum(3)}, ${sum(4)} more waiting`],
    ]),
  ];
}

