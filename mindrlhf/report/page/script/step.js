// One step, or the median of all: its phases as a waterfall, and the memory of each role.
const PHASE = "timing_s/", ROLE = "swap/role_gb/", PEAK = "perf/max_memory_allocated_gb";

// A metric's value at the chosen step (or at the point that has the step in it), or its median; a step that has not
// had a phase has spent no time in it.
function valueAt(run, name) {
  const values = run.metrics[name];
  if (!values) return null;
  if (chosenStep === null) return median(name.startsWith(PHASE) ? values.map((value) => value ?? 0) : values);
  return values[run.steps.findIndex((step) => step >= chosenStep)] ?? null;
}

// Phases in the order of a step, one beginning where the one before it ends; what they do not add up to is `other`.
function waterfall() {
  const order = Object.keys(data.phases);
  const others = data.names.filter((name) => name.startsWith(PHASE) && name !== `${PHASE}step` && !order.includes(name));
  const begun = data.runs.map(() => 0), rows = [];
  const add = (name, sizes) => {
    const found = data.runs.flatMap((run, place) => {
      if (!(sizes[place] > 0)) return [];
      const start = begun[place];
      begun[place] += sizes[place];
      return [{ run: run.label, colour: colour(place), start, size: sizes[place], text: `${number(sizes[place], 3)} s` }];
    });
    if (found.length) rows.push({ name, bars: found });
  };
  for (const name of [...order, ...others]) add(shortName(name), data.runs.map((run) => valueAt(run, name)));
  add("other", data.runs.map((run, place) => (valueAt(run, `${PHASE}step`) ?? 0) - begun[place]).map((rest) => (rest > 1e-3 ? rest : 0)));
  return rows;
}

const gigabytes = (size) => (size < 1 ? `${number(1024 * size, 3)} MiB` : `${number(size, 3)} GiB`);

// Largest roles first; sizes in `unit` of GiB.
function memory(unit) {
  const rows = data.names.filter((name) => name.startsWith(ROLE)).map((name) => ({
    name: name.slice(ROLE.length).replaceAll("_", " "),
    bars: data.runs.flatMap((run, place) => {
      const size = valueAt(run, name);
      return size === null ? [] : [{ run: run.label, colour: colour(place), start: 0, size: size / unit, text: gigabytes(size) }];
    }),
  }));
  const largest = (row) => Math.max(...row.bars.map((bar) => bar.size));
  return rows.filter((row) => row.bars.length).sort((a, b) => largest(b) - largest(a));
}

function drawStep() {
  const which = chosenStep === null ? "median of all steps" : `step ${chosenStep}`;
  const header = (unit) => ["", ...(several ? ["run"] : []), `start (${unit})`, `size (${unit})`];
  const peaks = data.runs.map((run) => valueAt(run, PEAK)).filter((peak) => peak !== null).map(gigabytes).join(" and ");
  const small = Math.max(0, ...memory(1).flatMap((row) => row.bars.map((bar) => bar.size))) < 1;
  const [unit, short] = small ? [1 / 1024, "MiB"] : [1, "GiB"];
  const figures = [
    [waterfall(), "Phases of a step", `seconds, ${which}`, "s"],
    [memory(unit), "Memory by role", `${short}, ${which}${peaks && `; peak of the whole process: ${peaks}`}`, short],
  ].filter(([rows]) => rows.length).map(([rows, title, about, short]) => bars(title, about, rows, header(short)));
  byId("step").hidden = !figures.length;
  document.querySelector("#step .charts").replaceChildren(...figures);
  figures.forEach((one) => one.redraw());
}
