// Figures: a caption, a picture with axes and a cursor, and a legend with the values at the cursor.
const HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 22;
const HEADROOM = 0.06; // of the range of values, above the highest
const LEAST_SMOOTHED = 20;

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

// Ends of the axis of values. A share's are 0 and 1, or 0 and 0.1 where no value is above; others begin at 0 unless
// the values are far from it, and have room above the highest.
function range(known, share) {
  const most = Math.max(...known, 0);
  if (share) return [0, most <= 0.1 ? 0.1 : Math.max(1, most)];
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  if (low >= 0 && low <= high / 2) low = 0;
  const size = high - low > 1e-12 * Math.max(1, Math.abs(high)) ? high - low : Math.abs(high) || 1;
  return [low === 0 ? 0 : low - HEADROOM * size, high + HEADROOM * size];
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

// A box with a caption, the buttons of export.js and a picture, which `draw(picture, width)` fills when it is shown.
function box(title, unit, table, draw, file = "") {
  const picture = shape("svg", { role: "img", "aria-label": [title, unit].filter(Boolean).join(", ") });
  const legend = element("div", { class: "legend" });
  const caption = element("figcaption", {}, element("span", {}, title, element("small", {}, unit)));
  const made = element("figure", {}, caption, picture, legend);
  caption.append(saveButtons(made, title, `${title} ${file}`, table));
  made.redraw = () => {
    const width = Math.max(200, picture.clientWidth || 380);
    picture.replaceChildren();
    draw(picture, width);
  };
  return { made, picture, legend };
}

// A figure of curves by step. series: {name, colour, dash, steps, values}. look: "lines"; "areas", each on top of the
// ones before it; "bands", areas between the first and last series, the second and the last but one, and so on.
function curves(title, unit, series, { look = "lines", share = false, noise = 0, file } = {}) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const places = series.map((one) => new Map(one.steps.map((step, index) => [step, index])));
  const table = () => [
    ["step", ...series.map((one) => one.name)],
    ...steps.map((step) => [step, ...series.map((one, index) => one.values[places[index].get(step)] ?? null)]),
  ];
  const { made, picture, legend } = box(title, unit, table, draw, file);
  let shown = null, cursor = null, across = null;

  function label(step) {
    shown = step;
    if (cursor) {
      cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, across(step ?? 0));
    }
    legend.replaceChildren(...(step === null ? [] : [element("span", {}, `step ${step}`)]));
    series.forEach((one, index) => {
      const isLine = look === "lines" || (look === "bands" && index === series.length >> 1);
      const mark = element("i", isLine ? {} : { class: "area" });
      mark.style[isLine ? "borderTopColor" : "background"] = one.colour;
      if (one.dash) mark.style.borderTopStyle = "dashed";
      if (!isLine && look === "bands") mark.style.opacity = index % (series.length - 1) ? 0.5 : 0.25;
      const place = step === null ? one.values.findLastIndex((value) => value !== null) : places[index].get(step);
      legend.append(element("span", {}, mark, one.name, " ", element("b", {}, (share ? percent : number)(one.values[place], 3))));
    });
  }
  made.mark = () => label(nearest(chosenStep));

  // The step closest to one that another run or a distribution may not have.
  function nearest(step) {
    if (step === null || !steps.length) return null;
    return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  }

  function draw(picture, width) {
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const weight = Number(byId("smoothing").value);
    const drawn = look === "areas"
      ? stack(series, steps, places)
      : series.map((one) => ({ ...one, top: look === "lines" ? smoothed(one.values, weight) : one.values }));
    const known = drawn.flatMap((one) => [...one.top, ...(one.below ?? one.values)]).filter((value) => value !== null);
    const [low, high] = range(known, share);
    const first = steps[0] ?? 0, last = steps.at(-1) ?? 1, room = width - LEFT - RIGHT;
    across = (step) => LEFT + (last === first ? room / 2 : (room * (step - first)) / (last - first));
    const up = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low);
    axes(picture, width, across, up, ticks(low, high, 3), steps);
    const points = (one, values) => one.steps.map((step, index) => [across(step), values[index] === null ? null : up(values[index])]);
    const area = (one, top, below, opacity) => {
      const d = path([...points(one, top), ...points(one, below).reverse()]) + "Z";
      picture.append(shape("path", { class: "area", d, style: `fill:${one.colour};stroke:${one.colour}`, opacity }));
    };
    if (look === "areas") drawn.forEach((one) => area(one, one.top, one.below, 1));
    if (look === "bands") for (let at = 0; at < drawn.length >> 1; at++) area(drawn[at], drawn.at(-1 - at).values, drawn[at].values, 0.25);
    const kept = { lines: drawn, areas: [], bands: drawn.filter((_, at) => at === drawn.length >> 1) }[look];
    for (const one of kept) {
      const style = `stroke:${one.colour}`;
      if (one.top !== one.values) picture.append(shape("path", { class: "raw", d: path(points(one, one.values)), style }));
      picture.append(shape("path", { class: "curve", d: path(points(one, one.top)), style, "stroke-dasharray": one.dash ?? "" }));
      const dots = points(one, one.values).filter(([, y]) => y !== null);
      if (dots.length < LEAST_SMOOTHED)
        for (const [cx, cy] of dots) picture.append(shape("circle", { cx, cy, r: 3, style: `fill:${one.colour}` }));
    }
    cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    picture.append(cursor);
    label(shown ?? nearest(chosenStep));
  }

  picture.setAttribute("tabindex", 0);
  picture.addEventListener("focus", () => legend.setAttribute("aria-live", "polite"));
  const at = (event) => {
    const frame = picture.getBoundingClientRect(), x = event.clientX - frame.left;
    return steps.reduce((a, b) => (Math.abs(across(b) - x) < Math.abs(across(a) - x) ? b : a), steps[0]);
  };
  picture.addEventListener("pointermove", (event) => label(at(event)));
  picture.addEventListener("pointerleave", () => label(nearest(chosenStep)));
  picture.addEventListener("click", (event) => chooseStep(at(event) === chosenStep ? null : at(event)));
  picture.addEventListener("blur", () => {
    legend.removeAttribute("aria-live");
    label(nearest(chosenStep));
  });
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const place = shown === null ? steps.length - 1 : steps.indexOf(shown);
    if (move) label(steps[Math.max(0, Math.min(steps.length - 1, place + move))]);
    else if (event.key === "Enter") chooseStep(shown);
    else if (event.key === "Escape") chooseStep(null);
    else return;
    event.preventDefault();
  });
  made.flat = look === "lines" && series.every((one) => one.values.every((value) => Math.abs(value ?? 0) <= noise));
  label(null);
  return made;
}

function axes(picture, width, across, up, values, steps) {
  for (const value of values) {
    picture.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(value), y2: up(value) }));
    picture.append(shape("text", { x: LEFT - 6, y: up(value) + 4, "text-anchor": "end" }, number(value, 6)));
  }
  const [first, last] = [steps[0] ?? 0, steps.at(-1) ?? 1];
  for (const step of ticks(first, last, Math.max(2, Math.floor(width / 150))).filter(Number.isInteger))
    picture.append(shape("text", { x: across(step), y: HEIGHT - 6, "text-anchor": "middle" }, String(step)));
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

// A figure of horizontal bars. rows: {name, bars: [{colour, start, size, text}]}, several bars of a row below each
// other.
function bars(title, unit, rows, header) {
  const THICK = 16, GAP = 8, SIDE = 118, VALUE = 62;
  const table = () => [header, ...rows.flatMap((row) => row.bars.map((bar) => [row.name, ...(several ? [bar.run] : []), bar.start, bar.size]))];
  const { made, legend } = box(title, unit, table, (picture, width) => {
    const most = Math.max(1e-12, ...rows.flatMap((row) => row.bars.map((bar) => bar.start + bar.size)));
    const across = (value) => SIDE + ((width - SIDE - VALUE) * value) / most;
    let y = TOP;
    for (const row of rows) {
      const height = THICK * row.bars.length;
      picture.append(shape("text", { x: SIDE - 8, y: y + height / 2 + 4, "text-anchor": "end" }, row.name));
      for (const bar of row.bars) {
        const size = Math.max(1, across(bar.start + bar.size) - across(bar.start));
        picture.append(shape("rect", { x: across(bar.start), y: y + 1, width: size, height: THICK - 2, rx: 2, style: `fill:${bar.colour}` }));
        picture.append(shape("text", { class: "value", x: across(bar.start) + size + 5, y: y + THICK - 4 }, bar.text));
        y += THICK;
      }
      y += GAP;
    }
    for (const value of ticks(0, most, 4)) {
      picture.prepend(shape("line", { class: "grid", x1: across(value), x2: across(value), y1: TOP, y2: y }));
      picture.append(shape("text", { x: across(value), y: y + 16, "text-anchor": "middle" }, number(value)));
    }
    picture.setAttribute("viewBox", `0 0 ${width} ${y + BOTTOM}`);
    picture.style.height = `${y + BOTTOM}px`;
  });
  if (several)
    data.runs.forEach((run, place) => {
      const mark = element("i", { class: "area" });
      mark.style.background = colour(place);
      legend.append(element("span", {}, mark, run.label));
    });
  made.mark = () => {};
  return made;
}
