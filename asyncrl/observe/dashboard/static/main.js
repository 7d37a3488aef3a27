"use strict";
// State of the page, its tabs and runs, and where its data comes from: itself (a report), or its server.

const TOKEN = new URLSearchParams(location.hash.slice(1)).get("token") || "";
const EVERY_MS = 3000;
const state = {
  page: "Overview", hidden: new Set(), smoothing: 0, search: "", colouring: "version",
  filter: { step: "", group: "", least: "", most: "", length: "", age: "" }, runs: [], resizers: [],
};

function view() {
  const runs = state.runs.filter((run) => !state.hidden.has(run.name));
  return {
    ...state, runs, run: runs[0], onresize: state.resizers,
    colour: (run) => RUN_COLOURS[state.runs.findIndex((each) => each.name === run.name) % RUN_COLOURS.length],
    set: (changes) => { Object.assign(state, changes); render(); },
  };
}

function choose(page) { state.page = page; render(); scrollTo(0, 0); }

function render() {
  const now = view();
  state.resizers.length = 0;
  tip(null, "");
  document.getElementById("tabs").replaceChildren(...Object.keys(PAGES).map((page, index) =>
    element("button", { role: "tab", title: `key ${index + 1}`, "aria-selected": page === state.page, onclick: () => choose(page) }, page)));
  document.getElementById("runs").replaceChildren(...state.runs.map((run) => element("button", {
    "aria-pressed": !state.hidden.has(run.name), title: run.folder,
    onclick: () => { if (!state.hidden.delete(run.name)) state.hidden.add(run.name); render(); },
  }, element("span", { class: "dot", style: { background: now.colour(run) } }), `${run.name} ${run.state}`)));
  const cards = now.run ? PAGES[state.page](now) : [card(12, "No run is shown", "choose one at the top")];
  document.getElementById("main").replaceChildren(element("div", { class: "grid" }, cards));
}

function tell(text) { document.getElementById("state").textContent = text; }

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${TOKEN}` } });
  if (answer.status === 401) throw new Error("the token is wrong: open the address that the command printed");
  if (!answer.ok) throw new Error(`the dashboard answered ${answer.status}`);
  return answer.json();
}

function typing() { return ["INPUT", "SELECT"].includes(document.activeElement?.tagName); }

async function follow() {
  let seen = "";
  for (;;) {
    try {
      const { version, runs } = await ask(`api/runs?seen=${encodeURIComponent(seen)}`);
      tell("live");
      if (version !== seen && !typing()) {
        [state.runs, seen] = [runs, version];
        const at = scrollY;
        render();
        scrollTo(0, at);
      }
    } catch (error) {
      tell(error instanceof TypeError ? "the dashboard has ended; start the command again" : error.message);
      if (!state.runs.length) document.getElementById("main").replaceChildren(card(12, "Nothing to show", error.message));
    }
    await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
  }
}

addEventListener("resize", () => state.resizers.forEach((resize) => resize()));
addEventListener("keydown", (event) => {
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  if (page && !typing() && !event.ctrlKey && !event.metaKey && !event.altKey) choose(page);
});
addEventListener("hashchange", () => location.reload());

if (DATA) {
  state.runs = DATA;
  tell("report");
  render();
} else {
  follow();
}
