// The cards of runs and the sections of charts.
const shortName = (name) => data.phases[name] ?? name.replace(/^(timing_s|swap|perf|val-core|actor|reward)\//, "");

function lines(chart) {
  const series = data.runs.flatMap((run, place) =>
    chart.metrics.filter((name) => run.metrics[name]).map((name, index) => ({
      name: [...(several ? [run.label] : []), ...(several && chart.metrics.length === 1 ? [] : [shortName(name)])].join(" · "),
      colour: colour(several ? place : chart.metrics.indexOf(name)),
      dash: several ? DASHES[index % DASHES.length] : "",
      steps: run.steps,
      values: run.metrics[name],
    })),
  );
  return curves(chart.title, chart.unit, series, { share: chart.share, noise: chart.noise });
}

// Largest parts first; what the parts do not add up to is shown as `other`.
function areas(chart, run) {
  const found = chart.metrics.filter((name) => run.metrics[name] && sum(run.metrics[name]) > 0);
  found.sort((a, b) => sum(run.metrics[b]) - sum(run.metrics[a]));
  const parts = found.map((name) => ({ name: shortName(name), values: run.metrics[name] }));
  const whole = chart.remainder && run.metrics[chart.remainder];
  if (whole) {
    const apart = run.metrics[chart.apart] ?? [];
    const rest = whole.map((value, at) => value === null ? null : Math.max(0, value - (apart[at] ?? 0) - sum(parts.map((part) => part.values[at]))));
    if (sum(rest) > 0) parts.push({ name: "other", values: rest });
  }
  return parts.map((part, index) => ({ ...part, colour: colour(index), steps: run.steps }));
}

// Areas from the lowest rewards to the highest, in colours between two.
function rewards(chart, run) {
  const bins = run.distributions.rewards ?? [], last = Math.max(1, bins.length - 1);
  return bins.map(([name, values], at) => ({
    name: `reward ${name}`, values, steps: run.distributions.steps, colour: `color-mix(in oklab, var(--most) ${(100 * at) / last}%, var(--least))`,
  }));
}

function lengths(chart, run) {
  const mine = colour(several ? data.runs.indexOf(run) : 0);
  return (run.distributions.lengths ?? []).map(([name, values]) => ({ name, values, steps: run.distributions.steps, colour: mine }));
}

const BY_RUN = { areas: [areas, "areas"], rewards: [rewards, "areas"], lengths: [lengths, "bands"] };

function chartFigures(chart) {
  if (chart.kind === "lines") return [lines(chart)];
  const [collect, look] = BY_RUN[chart.kind];
  return data.runs.flatMap((run) => {
    const series = collect(chart, run), unit = several ? `${run.label} · ${chart.unit}` : chart.unit;
    return series.length ? [curves(chart.title, unit, series, { look, share: chart.share, file: several ? run.label : "" })] : [];
  });
}

// Charts that are 0 throughout, but for rounding, are folded away below the others.
function drawCharts(section, charts, folds = true) {
  const figures = charts.flatMap(chartFigures);
  const flat = figures.filter((one) => folds && one.flat), rest = figures.filter((one) => !flat.includes(one));
  const place = document.querySelector(`#${section} .charts`);
  place.replaceChildren(...(figures.length ? rest : [element("p", { class: "quiet" }, "nothing has been measured yet")]));
  place.parentElement.querySelector(".folded")?.remove();
  rest.forEach((one) => one.redraw());
  if (!flat.length) return;
  const names = flat.map((one) => one.querySelector("figcaption span").firstChild.textContent).join(", ");
  const fold = element("details", { class: "folded" }, element("summary", {}, `0 throughout, or rounding alone: ${names}`), element("div", { class: "charts" }, ...flat));
  fold.addEventListener("toggle", () => flat.forEach((one) => one.redraw()));
  place.after(fold);
}

function pairs(entries) {
  return element("dl", {}, ...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function drawRuns() {
  const cards = data.runs.map((run, place) => {
    const note = run.width > 1 ? [element("p", { class: "quiet" }, `A point of its curves is the mean of ${run.width} steps.`)] : [];
    const start = element("details", {}, element("summary", {}, "how it was started"), pairs([...run.facts, ["folder", run.folder]]));
    if (run.command) start.append(element("pre", { class: "command", tabindex: 0 }, run.command));
    const brief = ["started", "model", "host"].map((name) => run.facts.find(([fact]) => fact === name)?.[1]).filter(Boolean);
    const card = element("article", { class: "run" }, element("h2", {}, run.label), element("p", { class: "quiet" }, brief.join(" · ")), pairs(run.summary), ...note, start);
    card.querySelector("dl").classList.add("summary");
    if (run.hints.length) {
      const hints = run.hints.map(([step, text]) => element("li", {}, button(`step ${step}`, () => chooseStep(step), { class: "link" }), ` ${text}`));
      card.append(element("details", { class: "hints" }, element("summary", {}, `what stands out (${hints.length})`), element("ul", {}, ...hints)));
    }
    card.style.setProperty("--mine", colour(place));
    return card;
  });
  byId("runs").replaceChildren(...cards);
}

function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => String(value) === before)) select.value = before;
}

function drawAny() {
  const select = document.querySelector("#any select");
  const first = select.value === "" && data.names.find((name) => data.runs.some((run) => run.metrics[name]?.some(Boolean)));
  fill(select, data.names.map((name) => [name, name]));
  if (first) select.value = first;
  byId("any").hidden = !data.names.length;
  if (data.names.length) drawCharts("any", [{ title: select.value, unit: "", metrics: [select.value], kind: "lines" }], false);
}
