"use strict";
// The five pages. Each takes the view (runs that are shown, the first of them as `run`) and returns its cards.

function findingCard(finding) {
  const todo = [finding.advice, finding.gain].filter(Boolean).join(" ");
  return element("section", { class: `card w12 finding ${finding.level}` },
    element("h3", {}, finding.title), element("p", {}, capital(finding.sentence)),
    todo ? element("p", { class: "todo" }, `→ ${todo}`) : null, element("div", { class: "sub", style: { margin: "4px 0 0" } }, finding.link));
}

function findings(run, most) {
  const found = run.doctor.findings.slice(0, most).map(findingCard);
  if (!found.length) found.push(card(12, "Nothing is wrong", "as far as the run's files tell"));
  return found;
}

function tile(title, value, more) {
  return element("section", { class: "card tile w3" }, element("div", { class: "sub" }, title),
    element("div", { class: "value" }, value, " ", element("small", {}, more || "")));
}

function stages(width, run) {
  const rows = run.doctor.stages.map((stage) => [stage.name.trim(), stage.use === null ? "?" : `${Math.round(100 * stage.use)} %`,
    element("div", { class: "meter" }, element("i", { class: stage.use > 0.85 ? "full" : "", style: { width: `${Math.min(100, 100 * (stage.use || 0))}%` } })),
    stage.figures]);
  const missing = run.doctor.not_measured.map((each) => element("div", { class: "sub" }, `not measured: ${each}`));
  return card(width, "Stages", "how much of each is in use; what is full sets the pace", rows.length ? table(["stage", "use", "", "figures"], rows, [1]) : null, ...missing);
}

function evaluated(run) {
  const names = Object.keys(run.series).filter((name) => name.startsWith("eval/"));
  return names.find((name) => name.endsWith("/accuracy")) || names.find((name) => name.endsWith("/reward_mean"));
}

function overview(view) {
  const { run } = view, series = run.series, score = evaluated(run);
  if (!run.step && !(series.step || []).length) {
    return [...findings(run, 3), card(12, "No complete step yet", "curves begin with the first one; what each process does is under Health")];
  }
  const name = score || "reward/mean";
  return [
    ...findings(run, 2),
    tile(score ? score.replace("eval/", "").replace("/", " ") : "reward", number(last(series[name]), 3), `from ${number(known(series[name])[0], 3)}`),
    tile("step", String(run.step), run.outlook || `of ${run.total}, ${run.state}`),
    tile("mean age of tokens", number(mean((series["staleness/mean"] || []).slice(-10))), `of at most ${run.eta} versions`),
    tile("generated tokens a second", number(mean((series["throughput/gen_tokens_per_s"] || []).slice(-10))), ""),
    chart(6, "Reward", score ? `of the trained batch, and ${score}` : "of the trained batch", [["reward/mean", "reward"], ...(score ? [[score, "held out", true]] : [])], view, 210),
    ageMap(6, run, view), stepBar(5, run), stages(7, run),
  ];
}

const FIRST_CURVES = [
  ["Reward", "mean of the trained batch", [["reward/mean", "reward"]]],
  ["Entropy", "nats a token", [["entropy", "entropy"]]],
  ["Distance from the policy that wrote the tokens", "nats a token", [["ppo/behave_kl", "behaviour"], ["ppo/approx_kl", "within the step"]]],
  ["Gradient norm", "before clipping", [["grad_norm", "mean"], ["grad_norm/max", "greatest", true]]],
  ["Groups that teach nothing", "share without variance", [["reward/frac_zero_std", "share"]]],
  ["Answer length", "received against trained: a gap is selection by length", [["rollout/received_len_mean", "received"], ["rollout/len_mean", "trained", true]]],
];

function differences(view) {
  const names = [...new Set(view.runs.flatMap((run) => Object.keys(run.config)))].sort();
  const differing = names.filter((name) => new Set(view.runs.map((run) => JSON.stringify(run.config[name]))).size > 1);
  return card(12, "Settings that differ", null, differing.length
    ? table(["setting", ...view.runs.map((run) => run.name)], differing.map((name) => [name, ...view.runs.map((run) => String(run.config[name] ?? "–"))]))
    : element("div", { class: "sub" }, "none"));
}

function learning(view) {
  const shown = new Set(FIRST_CURVES.flatMap(([, , curves]) => curves.map(([name]) => name)));
  const all = [...new Set(view.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => name !== "step").sort();
  const evals = all.filter((name) => name.startsWith("eval/"));
  const rest = all.filter((name) => !shown.has(name) && !name.startsWith("eval/") && !name.startsWith("time/"));
  const wanted = rest.filter((name) => name.includes(view.search));
  return [
    element("section", { class: "card w12" }, element("div", { class: "controls" },
      element("label", {}, "smoothing ", element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, onchange: (event) => view.set({ smoothing: Number(event.target.value) }) })),
      element("label", {}, "metric ", element("input", { type: "search", value: view.search, placeholder: "name", onchange: (event) => view.set({ search: event.target.value }) })),
      element("span", {}, `${all.length} metrics`))),
    ...(view.runs.length > 1 ? [differences(view)] : []),
    ...FIRST_CURVES.map(([title, sub, curves]) => chart(4, title, sub, curves, view)),
    ...evals.map((name) => chart(4, name, "", [[name, name.split("/").at(-1)]], view)),
    ...wanted.map((name) => chart(4, name, "", [[name, name]], view)),
  ];
}

function speed(view) {
  const { run } = view, times = Object.keys(run.series).filter((name) => name.startsWith("time/") && name.endsWith("_s"));
  const calls = ["generate", "reward", "env", "tool", "env_wait", "agent_wait", "process_wait", "thread_wait"].map((name) => [`rollout/${name}_s`, name.replace("_", " ")]);
  return [
    ...findings(run, 4), stepBar(5, run), stages(7, run), timelineCard(run, view),
    chart(4, "Step", "seconds", [["time/step_s", "step"], ["time/train_s", "trains"], ["time/wait_for_batch_s", "waits"]], view),
    chart(4, "Tokens a second", "", [["throughput/gen_tokens_per_s", "generated"], ["throughput/train_tokens_per_s", "trained"]], view),
    chart(4, "Seconds of a rollout", "by what they were spent on", calls, view),
    ...times.filter((name) => !["time/step_s", "time/train_s", "time/wait_for_batch_s", "time/elapsed_s"].includes(name))
      .map((name) => chart(4, name, "seconds of a step", [[name, name]], view, 140)),
  ];
}

function pieceColour(piece, colouring) {
  const [, version, behave, proximal, advantage] = piece;
  if (colouring === "version") return VERSION_COLOURS[version % VERSION_COLOURS.length] + (DARK ? "66" : "");
  if (colouring === "advantage") return advantage === null || advantage === undefined ? "" : advantage >= 0 ? `rgba(31,157,102,${Math.min(0.75, advantage / 2)})` : `rgba(214,69,69,${Math.min(0.75, -advantage / 2)})`;
  if (behave === null || behave === undefined) return "";
  if (colouring === "log-probability") return `rgba(224,102,47,${Math.min(0.9, Math.sqrt(Math.max(0, -behave)) * 0.75)})`;
  return proximal === null || proximal === undefined ? "" : `rgba(154,91,209,${Math.min(0.9, Math.abs(behave - proximal) * 3)})`;
}

function sampleText(sample, colouring) {
  const shown = element("div", { class: "text" });
  for (const piece of sample.pieces) {
    const [text, version, behave, proximal, advantage] = piece;
    if (version < 0) { shown.append(element("span", { class: "given" }, text)); continue; }
    const details = `version ${version}` + (sample.by_token ? `, log-probability ${number(behave, 3)}, trainer's ${number(proximal, 3)}, advantage ${number(advantage, 3)}` : "");
    shown.append(element("span", { style: { background: pieceColour(piece, colouring) }, onmousemove: (event) => tip(event, details), onmouseleave: (event) => tip(event, "") }, text));
  }
  return shown;
}

function samples(view) {
  const { run, filter } = view;
  if (!run.samples.rows.length) return [card(12, "No samples", run.samples.why)];
  const values = (of) => [...new Set(run.samples.rows.map(of))], groups = values((row) => row.group).sort();
  const fits = (row) => (filter.step === "" || row.step === Number(filter.step)) && (filter.group === "" || row.group === filter.group) && row.reward >= (filter.least === "" ? -Infinity : Number(filter.least))
    && row.reward <= (filter.most === "" ? Infinity : Number(filter.most)) && row.length >= Number(filter.length || 0) && (row.staleness || 0) >= Number(filter.age || 0);
  const rows = run.samples.rows.filter(fits);
  const input = (name, label) => element("label", {}, `${label} `, element("input", { type: "number", step: "any", value: filter[name], onchange: (event) => view.set({ filter: { ...filter, [name]: event.target.value } }) }));
  const choice = (name, among) => element("label", {}, `${name} `, element("select", { onchange: (event) => view.set({ filter: { ...filter, [name]: event.target.value } }) },
    element("option", { value: "" }, "all"), among.map((each) => { const option = element("option", { value: each }, String(each)); option.selected = String(each) === filter[name]; return option; })));
  const colourings = ["version", "log-probability", "advantage", "difference of engines"];
  return [element("section", { class: "card w12" }, element("h3", {}, "Samples"),
    element("div", { class: "controls" }, "colour by ", colourings.map((each) => element("button", { "aria-pressed": each === view.colouring, onclick: () => view.set({ colouring: each }) }, each))),
    element("div", { class: "controls" }, choice("step", values((row) => row.step)), groups.length > 1 ? choice("group", groups.filter(Boolean)) : null,
    input("least", "reward from"), input("most", "to"), input("length", "tokens from"), input("age", "age from"), element("span", {}, `${rows.length} of ${run.samples.rows.length}`)),
    rows.map((row) => element("div", { class: "sample" },
      element("div", { class: "about" }, `step ${row.step} · ${row.prompt}${row.group ? ` · ${row.group}` : ""} · reward ${number(row.reward, 3)}`
        + Object.entries(row.parts).map(([name, value]) => `, ${name} ${number(value, 3)}`).join("") + ` · age ${row.staleness ?? "–"} · ${row.length} tokens${row.truncated ? " · cut off" : ""}`),
      (row.pictures || []).map((url) => element("img", { class: "picture", src: url, alt: "" })), sampleText(row, view.colouring))),
    rows.length ? null : element("div", { class: "sub" }, "no sample fits these filters"))];
}

function health(view) {
  const { run } = view, counts = run.counts, dropped = Object.entries(counts.dropped || {});
  const rows = [["submitted", counts.submitted], ["trained", counts.trained], ...dropped.map(([reason, count]) => [`dropped: ${reason}`, count]),
    ["under way", counts.running], ["finished, untrained", counts.finished_untrained], ["abandoned", counts.abandoned]];
  const drops = run.dropped.reasons, steps = run.dropped.steps;
  const dropView = { ...view, runs: [{ ...run, series: { step: steps, ...drops } }], smoothing: 0 };
  const processes = run.processes.map((each) => [each.name, each.ended ? "ended" : each.silent_s > 10 && run.state === "running" ? `silent since ${seconds(each.silent_s)}` : `${each.stage}, ${seconds(each.since_s)}`,
    bytes(each.rss), each.cpu === null ? "–" : each.cpu.toFixed(2), `${each.late_s.toFixed(2)} s`, each.loop_late_s === null ? "–" : `${each.loop_late_s.toFixed(2)} s`]);
  const memory = { ...view, smoothing: 0, runs: run.processes.map((each) => ({ name: each.name, series: { step: each.at, rss: each.rss_at } })), colour: (one) => RUN_COLOURS[run.processes.findIndex((each) => each.name === one.name) % RUN_COLOURS.length] };
  const servers = run.processes.filter((each) => each.name.startsWith("generation_server") || each.name.startsWith("policy_server"));
  const ranks = run.processes.filter((each) => each.name.startsWith("model_worker"));
  const figures = ["running", "queued", "max_running", "kv_share", "tokens_per_s", "retracted_total"];
  return [
    ...findings(run, 9),
    card(4, "Rollout counts", "of every rollout that the gate let in", table(["", "rollouts"], rows.map(([name, count]) => [name, count === undefined ? "–" : count.toLocaleString("en")]), [1])),
    Object.keys(drops).length ? chart(8, "Dropped rollouts", "by reason and step", Object.keys(drops).map((reason) => [reason, reason]), dropView)
      : card(8, "Dropped rollouts", "none so far"),
    card(7, "Processes", "what each does, resident memory, processors in use, greatest lateness of its threads and loop", processes.length
      ? table(["process", "does", "memory", "processors", "late", "loop late"], processes, [2, 3, 4, 5]) : element("div", { class: "sub" }, "no lines in observed/")),
    chart(5, "Memory", "MiB over seconds", [["rss", "memory"]], memory),
    ...(servers.length ? [card(12, "Servers", "their newest figures", table(["server", ...figures.map((name) => name.replaceAll("_", " "))],
      servers.map((each) => [each.policy ? `${each.name} (${each.policy})` : each.name, ...figures.map((name) => number(each.figures[name]))]), figures.map((_, column) => column + 1)))] : []),
    ...(ranks.length ? [card(12, "Training ranks", "share of the device's peak in the newest step's calls, in which attention between the patches of a picture and the states of recurrent layers are not counted; memory in use, and at most", table(["rank", "MFU", "peak", "resident", "GPU", "GPU at most", "GPU has"],
      ranks.map((each) => [each.name, each.figures.mfu === undefined ? "–" : `${(100 * each.figures.mfu).toFixed(1)} %`, each.figures.peak_flops === undefined ? "–" : `${number(each.figures.peak_flops / 1e12)} TFLOP/s`,
        ...[each.rss, each.figures.gpu_used, each.figures.gpu_peak, each.figures.gpu_bytes].map((size) => size === undefined ? "–" : bytes(size))]), [1, 2, 3, 4, 5, 6]))] : []),
    ...(run.restarts.length ? [card(12, "Restarts", null, table(["time", "what"], run.restarts.map((each) => [new Date(1000 * each.time).toLocaleTimeString(),
      each.restarted ? `${each.restarted} ${each.reason || ""}` : `${each.went_on} went on after ${each.seconds} s`])))] : []),
    ...(run.notices.length ? [card(12, "Notices", null, element("pre", {}, run.notices.join("\n")))] : []),
    ...Object.entries(run.logs).map(([name, text]) => card(6, name, "the end of its log", element("pre", {}, text || "empty"))),
  ];
}

const PAGES = { Overview: overview, Learning: learning, Speed: speed, Samples: samples, Health: health };
