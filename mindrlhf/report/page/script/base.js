// What all parts share. Texts from a run only ever go through textContent.
const COLOURS = 8;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const several = data.runs.length > 1;

const colour = (index) => `var(--c${index % COLOURS})`;

const maker = (language) => (name, attributes = {}, ...children) => {
  const made = document.createElementNS(`http://www.w3.org/${language}`, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const element = maker("1999/xhtml"), shape = maker("2000/svg");

function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  for (const [unit, name] of [[1e6, "M"], [1e4, "k"]])
    if (size >= unit) return (value / (name === "k" ? 1e3 : unit)).toFixed(1) + name;
  return String(Number(value.toPrecision(digits)));
}

const percent = (share, digits) => (share === null || share === undefined ? "–" : `${number(100 * share, digits)}%`);
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

function median(values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!known.length) return null;
  return (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2;
}

// The step that the reader has chosen, or null: charts mark it, and other parts show it alone.
let chosenStep = null;
const stepListeners = [];
function chooseStep(step) {
  if (step === chosenStep) return;
  chosenStep = step;
  for (const listener of stepListeners) listener(step);
}
