// Draws the report from the JSON in #data. Texts from a run only ever go through textContent.
"use strict";
(() => {
  const COLOURS = 8;
  const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
  const GROUPS_AT_ONCE = 8;
  const LEAST_SMOOTHED = 20;
  const HEIGHT = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  let groupsShown = GROUPS_AT_ONCE;

  const colour = (index) => `var(--c${index % COLOURS})`;

  const maker = (language) => (name, attributes = {}, ...children) => {
    const made = document.createElementNS(`http://www.w3.org/${language}`, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const element = maker("1999/xhtml"), shape = maker("2000/svg");

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(1);
    for (const [unit, name] of [[1e6, "M"], [1e4, "k"]])
      if (size >= unit) return (value / (name === "k" ? 1e3 : unit)).toFixed(1) + name;
    return String(Number(value.toPrecision(digits)));
  }

  // Round tick values within low..high, at least about `count` of them.
  function ticks(low, high, count) {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [5, 2, 1].map((unit) => unit * power).find((unit) => unit <= raw * 1.001);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
      found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
    return found;
  }

  // Mean of each value and its neighbours on both sides, so that a rising curve is not shown late; weighted by a
  // Gaussian of `share` x a twelfth of the curve. Curves of few points stay as they are, and gaps stay gaps.
  function smoothed(values, share) {
    const known = values.flatMap((value, place) => (value === null ? [] : [place]));
    const width = (share * known.length) / 12;
    if (known.length < LEAST_SMOOTHED || width < 0.3) return values;
    const reach = Math.ceil(3 * width), made = values.map(() => null);
    const weights = Array.from({ length: reach + 1 }, (_, away) => Math.exp(-0.5 * (away / width) ** 2));
    known.forEach((place, index) => {
      let total = 0, weight = 0;
      for (let other = Math.max(0, index - reach); other <= Math.min(known.length - 1, index + reach); other++) {
        total += weights[Math.abs(other - index)] * values[known[other]];
        weight += weights[Math.abs(other - index)];
      }
      made[place] = total / weight;
    });
    return made;
  }

  function path(points) {
    const known = points.filter(([, y]) => y !== null); // a metric of every tenth step is still one curve
    return known.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
  }

  // One figure. series: {name, colour, dash, steps, values}; stacked: areas, each on top of the ones before it.
  function figure(title, unit, series, stacked) {
    const legend = element("div", { class: "legend" });
    const picture = shape("svg", { role: "img", "aria-label": `${title}, ${unit}` });
    const caption = element("figcaption", {}, title + " ", element("small", {}, unit));
    const box = element("figure", {}, caption, picture, legend);
    const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
    const places = series.map((one) => new Map(one.steps.map((step, index) => [step, index])));

    function label(step) {
      legend.replaceChildren(...(step === null ? [] : [element("span", {}, `step ${step}`)]));
      series.forEach((one, index) => {
        const mark = element("i", stacked ? { class: "area" } : {});
        mark.style[stacked ? "background" : "borderTopColor"] = one.colour;
        if (one.dash) mark.style.borderTopStyle = "dashed";
        const place = step === null ? one.values.findLastIndex((value) => value !== null) : places[index].get(step);
        legend.append(element("span", {}, mark, one.name, " ", element("b", {}, number(one.values[place]))));
      });
    }

    function draw() {
      const width = Math.max(200, picture.clientWidth || 380);
      picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      picture.replaceChildren();
      const weight = Number(byId("smoothing").value);
      const curves = stacked
        ? stack(series, steps, places)
        : series.map((one) => ({ ...one, top: smoothed(one.values, weight) }));
      const known = curves.flatMap((one) => [...one.top, ...(one.below || one.values)]).filter((v) => v !== null);
      let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
      if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
        const room = Math.abs(high) * 0.1 || 1;
        low -= low === 0 ? 0 : room;
        high += room;
      }
      const first = steps[0] ?? 0, last = steps.at(-1) ?? 1;
      const across = (step) => LEFT + ((width - LEFT - RIGHT) * (step - first)) / (last - first || 1) + (last === first ? (width - LEFT - RIGHT) / 2 : 0);
      const up = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low);
      for (const value of ticks(low, high, 3)) {
        picture.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(value), y2: up(value) }));
        picture.append(shape("text", { x: LEFT - 6, y: up(value) + 4, "text-anchor": "end" }, number(value, 6)));
      }
      for (const step of ticks(first, last, Math.max(2, Math.floor(width / 150))).filter(Number.isInteger))
        picture.append(shape("text", { x: across(step), y: HEIGHT - 6, "text-anchor": "middle" }, String(step)));
      for (const one of curves) {
        const points = (values) => one.steps.map((step, index) => [across(step), values[index] === null ? null : up(values[index])]);
        if (stacked) {
          const edge = path([...points(one.top), ...points(one.below).reverse()]);
          picture.append(shape("path", { class: "area", d: edge + "Z", style: `fill:${one.colour};stroke:${one.colour}` }));
          continue;
        }
        const style = `stroke:${one.colour}`;
        if (one.top !== one.values) picture.append(shape("path", { class: "raw", d: path(points(one.values)), style }));
        picture.append(shape("path", { class: "curve", d: path(points(one.top)), style, "stroke-dasharray": one.dash }));
        const dots = points(one.values).filter(([, y]) => y !== null);
        if (dots.length < LEAST_SMOOTHED)
          for (const [cx, cy] of dots) picture.append(shape("circle", { cx, cy, r: 3, style: `fill:${one.colour}` }));
      }
      const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      picture.append(cursor);
      picture.onpointermove = picture.onpointerdown = (event) => {
        const x = ((event.clientX - picture.getBoundingClientRect().left) * width) / picture.clientWidth;
        const nearest = steps.reduce((a, b) => (Math.abs(across(b) - x) < Math.abs(across(a) - x) ? b : a), first);
        for (const end of ["x1", "x2"]) cursor.setAttribute(end, across(nearest));
        cursor.setAttribute("visibility", "visible");
        label(nearest);
      };
      picture.onpointerleave = () => {
        cursor.setAttribute("visibility", "hidden");
        label(null);
      };
    }

    label(null);
    box.redraw = draw;
    return box;
  }

  function stack(series, steps, places) {
    let below = steps.map(() => 0);
    return series.map((one, index) => {
      const top = steps.map((step, at) => below[at] + Math.max(0, one.values[places[index].get(step)] ?? 0));
      const area = { ...one, steps, top, below };
      below = top;
      return area;
    });
  }

  const shortName = (name) => name.replace(/^(timing_s|swap|perf|val-core|actor|reward)\//, "");
  const several = data.runs.length > 1;

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
    return figure(chart.title, chart.unit, series, false);
  }

  // Largest parts first; what the parts do not add up to is shown as `other`.
  function areas(chart, run) {
    const total = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);
    const found = chart.metrics.filter((name) => run.metrics[name] && total(run.metrics[name]) > 0);
    found.sort((a, b) => total(run.metrics[b]) - total(run.metrics[a]));
    const parts = found.map((name) => ({ name: shortName(name), values: run.metrics[name] }));
    const whole = chart.remainder && run.metrics[chart.remainder];
    if (whole) {
      const apart = run.metrics[chart.apart] ?? [];
      const rest = whole.map((value, at) => value === null ? null : Math.max(0, value - (apart[at] ?? 0) - parts.reduce((sum, part) => sum + (part.values[at] ?? 0), 0)));
      if (total(rest) > 0) parts.push({ name: "other", values: rest });
    }
    const series = parts.map((part, index) => ({ ...part, colour: colour(index), steps: run.steps }));
    return figure(several ? `${chart.title}: ${run.label}` : chart.title, chart.unit, series, true);
  }

  function drawCharts(section, charts) {
    const figures = charts.flatMap((chart) =>
      chart.stacked ? data.runs.filter((run) => chart.metrics.some((name) => run.metrics[name])).map((run) => areas(chart, run)) : [lines(chart)],
    );
    const place = document.querySelector(`#${section} .charts`);
    place.replaceChildren(...(figures.length ? figures : [element("p", { class: "quiet" }, "nothing has been measured yet")]));
    figures.forEach((one) => one.redraw());
  }

  function drawRuns() {
    const cards = data.runs.map((run, place) => {
      const list = element("dl");
      for (const [name, value] of run.summary) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
      const notes = [run.folder, ...(run.width > 1 ? [`a point of its curves is the mean of ${run.width} steps`] : [])];
      const card = element("article", { class: "run" }, element("h3", {}, run.label), element("div", { class: "quiet folder" }, notes.join(" · ")), list);
      if (run.hints.length) {
        const hints = run.hints.map(([step, text]) => element("li", {}, element("b", {}, `step ${step}: `), text));
        card.append(element("details", { class: "hints" }, element("summary", {}, `what stands out (${hints.length})`), element("ul", {}, ...hints)));
      }
      card.style.borderLeftColor = colour(place);
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
    fill(select, data.names.map((name) => [name, name]));
    byId("any").hidden = !data.names.length;
    if (data.names.length) drawCharts("any", [{ title: select.value, unit: "", metrics: [select.value], stacked: false }]);
  }

  function badge(reward, low, high) {
    const share = high > low ? (reward - low) / (high - low) : 0.5;
    const kind = reward === null || high <= low ? "middle" : share > 0.66 ? "high" : share < 0.34 ? "low" : "middle";
    return element("span", { class: `badge ${kind}` }, reward === null ? "unscored" : number(reward));
  }

  function drawRollouts() {
    const form = document.querySelector("#rollouts .filters");
    fill(form.elements.run, data.runs.map((run, place) => [place, run.label]));
    form.elements.run.parentElement.hidden = !several;
    const run = data.runs[Number(form.elements.run.value) || 0];
    const steps = [...new Set(run.groups.map((group) => group.step))];
    fill(form.elements.step, [["", "all"], ...steps.map((step) => [step, step])]);
    const text = form.elements.text.value.toLowerCase();
    const bound = (name, otherwise) => (form.elements[name].value === "" ? otherwise : Number(form.elements[name].value));
    const low = bound("low", -Infinity), high = bound("high", Infinity);
    const bounded = low !== -Infinity || high !== Infinity;
    const rewards = run.groups.flatMap((group) => group.samples.map((row) => row.reward)).filter((reward) => reward !== null);
    const least = Math.min(...rewards), most = Math.max(...rewards);
    const inStep = run.groups.filter((group) => !form.elements.step.value || group.step === Number(form.elements.step.value));
    const groups = inStep.map((group) => {
      const asked = `${group.prompt}\n${group.ground_truth ?? ""}`.toLowerCase().includes(text);
      const samples = group.samples.filter((row) =>
        (row.reward === null ? !bounded : row.reward >= low && row.reward <= high) && (asked || row.completion.toLowerCase().includes(text)));
      return { ...group, samples };
    }).filter((group) => group.samples.length);
    const count = groups.reduce((sum, group) => sum + group.samples.length, 0);
    byId("count").textContent = run.rollout_steps
      ? `${count} answers to ${groups.length} prompts; samples of ${steps.length} of ${run.rollout_steps} steps are in this report`
      : "This run kept no rollouts: set trainer.save_rollouts=True to read them here.";
    form.hidden = !run.rollout_steps;
    byId("groups").replaceChildren(...groups.slice(0, groupsShown).map((group) => drawGroup(group, least, most)));
    byId("more").hidden = groups.length <= groupsShown;
  }

  function drawGroup(group, least, most) {
    const facts = element("div", { class: "quiet" }, element("span", {}, `step ${group.step}`), element("span", {}, `prompt ${group.prompt_id}`));
    if (group.ground_truth !== null) facts.append(element("span", {}, `expected: ${group.ground_truth}`));
    const answers = group.samples.map((row) => {
      const line = element("div", { class: "quiet" }, badge(row.reward, least, most));
      const functions = Object.entries(row.rewards ?? {});
      if (functions.length > 1) for (const [name, value] of functions) line.append(element("span", {}, `${name} ${number(value)}`));
      if (row.response_length !== undefined) line.append(element("span", {}, `${row.response_length} tokens`));
      if (row.finish_reason === "length") line.append(element("span", {}, "cut off"));
      if (row.advantage !== undefined) line.append(element("span", {}, `advantage ${number(row.advantage)}`));
      const turns = (row.turns ?? [[true, row.completion]]).map(([drawn, text]) => (drawn ? text : element("span", { class: "context" }, text)));
      return element("div", { class: "answer" }, line, element("pre", {}, ...turns));
    });
    const ask = element("div", { class: "ask" }, facts, element("pre", {}, group.prompt));
    return element("article", { class: "group" }, ask, element("div", { class: "answers" }, ...answers));
  }

  function drawSettings() {
    const form = document.querySelector("#settings .filters");
    form.elements.differing.parentElement.hidden = !several;
    const text = form.elements.text.value.toLowerCase();
    const differing = new Set(data.differing);
    let names = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
    if (several && form.elements.differing.checked) names = names.filter((name) => differing.has(name));
    names = names.filter((name) => [name, ...data.runs.map((run) => run.settings[name] ?? "")].join("\n").toLowerCase().includes(text));
    const head = element("tr", {}, element("th", {}, "setting"), ...data.runs.map((run) => element("th", {}, several ? run.label : "value")));
    const rows = names.map((name) =>
      element("tr", differing.has(name) ? { class: "differs" } : {}, element("th", { scope: "row" }, name), ...data.runs.map((run) => element("td", {}, run.settings[name] ?? "–"))));
    document.querySelector("#settings table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
    const without = data.runs.filter((run) => !Object.keys(run.settings).length).map((run) => run.label);
    let note = without.length ? `${without.join(", ")}: no settings.json in the run's folder.` : "";
    if (several && !without.length && !data.differing.length) note = "The runs have the same settings.";
    document.querySelector("#settings p").textContent = note;
  }

  const redraw = () => document.querySelectorAll("figure").forEach((one) => one.redraw());

  const rollouts = document.querySelector("#rollouts .filters"), settings = document.querySelector("#settings .filters");
  for (const form of [rollouts, settings]) form.addEventListener("submit", (event) => event.preventDefault());
  rollouts.addEventListener("input", () => {
    groupsShown = GROUPS_AT_ONCE;
    drawRollouts();
  });
  settings.addEventListener("input", drawSettings);
  settings.elements.differing.checked = several && data.differing.length > 0;
  byId("more").addEventListener("click", () => {
    groupsShown += GROUPS_AT_ONCE;
    drawRollouts();
  });
  byId("smoothing").addEventListener("input", redraw);
  document.querySelector("#any select").addEventListener("input", drawAny);
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    redraw();
  }).observe(document.body);
  drawRuns();
  drawCharts("learning", data.learning);
  drawCharts("cost", data.cost);
  drawAny();
  drawRollouts();
  drawSettings();

  // A live page: the file is rewritten, and loaded again unless the reader does something just now. Fields and focus
  // outlive that in the state of the page's place in the browser's history; browsers keep the scroll position.
  const fields = ["input, select", "details"].flatMap((kind) => [...document.querySelectorAll(kind)]);
  const content = (field) => (field.tagName === "DETAILS" ? "open" : field.type === "checkbox" ? "checked" : "value");

  function reload() {
    const values = fields.map((field) => field[content(field)]);
    history.replaceState({ values, groupsShown, focus: fields.indexOf(document.activeElement) }, "");
    location.reload();
  }

  function restore(state) {
    fields.forEach((field, place) => {
      field[content(field)] = state.values[place];
      field.dispatchEvent(new Event("input", { bubbles: true }));
    });
    groupsShown = state.groupsShown;
    drawRollouts();
    fields[state.focus]?.focus({ preventScroll: true });
  }

  if (history.state) restore(history.state);
  if (data.refresh_s) {
    let timer;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(reload, 1000 * data.refresh_s);
    };
    for (const event of ["input", "keydown", "pointerdown"]) addEventListener(event, wait);
    byId("live").textContent = `live, written ${new Date(document.lastModified).toLocaleTimeString()}`;
    wait();
  }
})();
