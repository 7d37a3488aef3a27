"use strict";
// The timeline of a run on a canvas: the wheel zooms, a drag moves, pointing tells.

const KIND_COLOURS = { update: "#e0a030", evaluation: "#a05fb5", checkpoint: "#8a8f98", restart: "#d9534f", call: "#7f9fc9", wait: "#d5d8dd" };

function timelineCard(run, view) {
  const line = run.timeline;
  if (!line) return card(12, "Timeline", "it begins with the first complete step");
  const lanes = line.tracks.map(() => 1);
  for (const [track, lane] of line.spans) lanes[track] = Math.max(lanes[track], lane + 1);
  const high = lanes.map((count) => (count > 8 ? 7 : 16));
  const top = [];
  let y = 4;
  line.tracks.forEach((_, track) => { top.push(y); y += lanes[track] * high[track] + 10; });
  const height = y + 18, left = innerWidth < 820 ? 96 : 150;
  let from = Math.max(0, line.length * 0.3), to = Math.min(line.length, from + line.length * 0.4);

  const colour = ([, , kind, name]) => {
    if (kind === "rollout") return VERSION_COLOURS[Number(name.slice(1)) % VERSION_COLOURS.length];
    if (kind === "step") return DARK ? "#2b3038" : "#e6eaf0";
    return PHASES[name] ? PHASES[name][1] : KIND_COLOURS[kind] || "#b9bec6";
  };
  const [made, redraw] = canvas(height, (context, wide) => {
    const x = (at) => left + ((at - from) / (to - from)) * (wide - left);
    context.fillStyle = DIM;
    line.tracks.forEach((track, index) => context.fillText(track.replace("generation_server", "server").replace("_worker", ""), 0, top[index] + 11, left - 6));
    context.save();
    context.beginPath(); context.rect(left, 0, wide - left, height); context.clip();
    for (const span of line.spans) {
      const [track, lane, kind, name, begin, end] = span;
      if (end < from || begin > to) continue;
      const width = Math.max(0.8, x(end) - x(begin) - 0.5);
      context.fillStyle = colour(span);
      context.fillRect(x(begin), top[track] + lane * high[track], width, high[track] - 1.5);
      if (kind === "step" && width > 30) {
        context.fillStyle = DIM;
        context.fillText(name.replace("step ", ""), x(begin) + width / 2 - 8, top[track] + 11);
      }
    }
    context.restore();
    context.fillStyle = DIM;
    const rough = (to - from) / 8, base = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((factor) => factor * base).find((value) => value >= rough);
    for (let at = Math.ceil(from / tick) * tick; at < to; at += tick) context.fillText(`${+at.toFixed(3)} s`, x(at), height - 5);
  }, view);

  const at = (event) => from + ((event.offsetX - left) / (made.clientWidth - left)) * (to - from);
  made.addEventListener("wheel", (event) => {
    event.preventDefault();
    const factor = Math.exp(event.deltaY / 500), middle = at(event);
    from = Math.max(0, middle - (middle - from) * factor);
    to = Math.min(line.length, middle + (to - middle) * factor);
    redraw();
  }, { passive: false });
  let drag = null;
  made.addEventListener("pointerdown", (event) => { drag = [event.clientX, from, to]; made.setPointerCapture(event.pointerId); });
  made.addEventListener("pointerup", () => { drag = null; });
  made.addEventListener("pointerleave", (event) => tip(event, ""));
  made.addEventListener("pointermove", (event) => {
    if (drag) {
      const moved = ((drag[0] - event.clientX) / (made.clientWidth - left)) * (drag[2] - drag[1]);
      const kept = Math.max(-drag[1], Math.min(line.length - drag[2], moved));
      [from, to] = [drag[1] + kept, drag[2] + kept];
      redraw();
      return;
    }
    const time = at(event), track = top.findLastIndex((edge) => event.offsetY >= edge);
    const lane = track < 0 ? -1 : Math.floor((event.offsetY - top[track]) / high[track]);
    const span = line.spans.find((each) => each[0] === track && each[1] === lane && each[4] <= time && time <= each[5]);
    tip(event, span ? `${span[3]}, ${number(1000 * (span[5] - span[4]), 0)} ms; ${span[6]}` : "");
  });
  const zoom = (factor) => {
    const middle = (from + to) / 2, half = ((to - from) / 2) * factor;
    from = Math.max(0, middle - half); to = Math.min(line.length, middle + half);
    redraw();
  };
  const button = (label, factor) => element("button", { onclick: () => zoom(factor) }, label);
  return card(12, "Timeline", "the newest steps; the wheel zooms, a drag moves; rollouts are coloured by the version that admitted them",
    element("div", { class: "controls" }, button("closer", 0.5), button("further", 2), button("all", 1e9)), made);
}
