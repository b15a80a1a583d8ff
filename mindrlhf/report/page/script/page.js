// The page as a whole: settings, the chosen step, addresses, and how a live page is loaded again.
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

const figures = () => document.querySelectorAll("figure");
const settings = document.querySelector("#settings .filters");
const stepFields = [form.elements.step, byId("chosen")];
for (const one of [form, settings]) one.addEventListener("submit", (event) => event.preventDefault());

// Fields of a step, the marks in the charts and the waterfall follow each other.
stepListeners.push((step) => {
  for (const field of stepFields) if (field.value !== String(step ?? "")) field.value = step ?? "";
  figures().forEach((one) => one.mark());
  drawStep();
});
for (const field of stepFields) field.addEventListener("input", () => chooseStep(field.value === "" ? null : Number(field.value)));
stepListeners.push(() => {
  unitsShown = UNITS_AT_ONCE;
  drawRollouts();
});

// The filters stand in the address, so that a link leads to a step and prompt.
const ADDRESSED = ["run", "step", "prompt", "low", "high", "text", "order"];
let addressing;
function writeAddress() {
  clearTimeout(addressing);
  addressing = setTimeout(() => {
    const fields = Object.fromEntries(ADDRESSED.map((name) => [name, form.elements[name].value]));
    if (!several) delete fields.run;
    if (fields.order === "spread") delete fields.order;
    const wanted = address(fields);
    if (wanted !== "#" || location.hash.includes("=")) history.replaceState(history.state, "", wanted === "#" ? location.pathname : wanted);
  }, 300);
}

function readAddress() {
  if (!location.hash.includes("=")) return false;
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ADDRESSED) form.elements[name].value = given.get(name) ?? { order: "spread" }[name] ?? "";
  if (form.elements.run.selectedIndex < 0) form.elements.run.selectedIndex = 0;
  unitsShown = UNITS_AT_ONCE;
  const step = form.elements.step.value;
  chooseStep(step === "" ? null : Number(step));
  return true;
}
addEventListener("hashchange", async () => {
  if (!readAddress()) return;
  await drawRollouts();
  byId("rollouts").scrollIntoView();
});
form.addEventListener("input", writeAddress);
stepListeners.push(writeAddress);

settings.addEventListener("input", drawSettings);
settings.elements.differing.checked = several && data.differing.length > 0;
byId("smoothing").addEventListener("input", () => figures().forEach((one) => one.redraw()));
document.querySelector("#any select").addEventListener("input", drawAny);
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  figures().forEach((one) => one.redraw());
}).observe(document.body);

// A live page: the file is rewritten, and loaded again unless the reader does something just now. Fields, focus and
// place outlive that in the state of the page's entry in the browser's history, by names: a rewritten page has others.
function fields() {
  const found = [...document.querySelectorAll("input, select, details")].filter((field) => !field.closest("#groups"));
  return new Map(found.map((field) => {
    const title = field.querySelector("summary")?.textContent.split(/[(:]/)[0];
    return [[field.closest("section, header, #runs").id, field.closest("article")?.querySelector("h2").textContent, field.name, title].join("/"), field];
  }));
}
const content = (field) => (field.tagName === "DETAILS" ? "open" : field.type === "checkbox" ? "checked" : "value");

function reload() {
  const found = [...fields()], focus = found.find(([, field]) => field === document.activeElement)?.[0];
  const values = Object.fromEntries(found.map(([name, field]) => [name, field[content(field)]]));
  history.replaceState({ values, unitsShown, top: scrollY, focus }, "");
  location.reload();
}

function restore(state) {
  for (const [name, field] of fields()) if (name in state.values) field[content(field)] = state.values[name];
  unitsShown = state.unitsShown;
  chosenStep = form.elements.step.value === "" ? null : Number(form.elements.step.value);
  figures().forEach((one) => one.redraw());
  drawAny();
  drawSettings();
}

drawRuns();
drawCharts("learning", data.learning);
drawCharts("cost", data.cost);
drawAny();
openRollouts();
drawSettings();
const linked = readAddress();
const before = history.state;
if (before?.values) restore(before);
drawStep();
drawRollouts().then(() => {
  if (before?.values) {
    scrollTo(0, before.top);
    fields().get(before.focus)?.focus({ preventScroll: true });
  } else if (linked) byId("rollouts").scrollIntoView();
});
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
