// Cards: a prompt with its answers of one step, of several steps, or of several runs side by side.
function address(fields) {
  return "#" + new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== "" && value !== null));
}

function kindOf(reward, run) {
  const { least, most } = EXTREMES[run];
  if (reward === null || most <= least) return "middle";
  const share = (reward - least) / (most - least);
  return share > 0.66 ? "high" : share < 0.34 ? "low" : "middle";
}

// A text with the searched one marked.
function marked(text, wanted) {
  if (!wanted) return [text];
  const parts = [], lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}

// The rewards of a group as a strip: from bad to good, as wide as they are frequent.
function strip(group) {
  const kinds = ["low", "middle", "high"], made = element("span", { class: "strip", "aria-hidden": "true" });
  for (const kind of kinds) {
    const count = group.rewards.filter((reward) => kindOf(reward, group.run) === kind).length;
    if (count) made.append(element("i", { class: kind, style: `flex:${count}` }));
  }
  return made;
}

function drawAnswer(answer, group, wanted) {
  const count = answer.samples.length, line = element("div", { class: "facts" });
  const mine = (place) => answer.samples.map((sample) => sample[place]).filter((value) => value !== null);
  const [advantages, lengths] = [mine(1), mine(2)];
  line.append(element("b", { class: "times", title: plural(count, "same answer") }, `${count} ×`));
  line.append(element("span", { class: `badge ${kindOf(answer.reward, group.run)}` }, answer.reward === null ? "unscored" : number(answer.reward)));
  for (const [name, value] of Object.entries(answer.rewards ?? {})) line.append(element("span", {}, `${name} ${number(value)}`));
  if (lengths.length) line.append(element("span", {}, plural(Math.round(mean(lengths)), "token")));
  if (mine(3).includes("length")) line.append(element("span", {}, "cut off"));
  if (advantages.length) line.append(element("span", {}, `advantage ${number(mean(advantages), 3)}`));
  const turns = (answer.turns ?? [[true, answer.text]]).map(([drawn, text], at) => [
    ...(drawn ? marked(text, wanted) : [element("span", { class: "context" }, ...marked(text, wanted))]),
    ...(answer.pictures?.[at]?.length ? [pictures(answer.pictures[at], "of the conversation")] : [])]);
  const whole = element("pre", { tabindex: 0 }, ...turns.flat());
  const notes = answer.notes ? [element("details", { class: "notes" }, element("summary", {}, "what reward functions noted"), pairs(answer.notes))] : [];
  const made = element("li", { class: "answer" }, line, ...notes, whole);
  if (answer.tokens) {
    const open = button("tokens", () => {
      const pressed = open.getAttribute("aria-pressed") === "true";
      open.setAttribute("aria-pressed", String(!pressed));
      made.lastChild.replaceWith(pressed ? whole : tokenView(answer));
      made.classList.toggle("wide", !pressed);
    }, { "aria-pressed": "false", class: "small" });
    line.append(open);
  }
  return made;
}

// A group's line of facts and its answers, those that the filters leave.
function drawGroup(group, one, filters) {
  const link = element("a", { href: address({ run: several ? group.run : "", step: group.step, prompt: group.prompt }) }, `step ${group.step}`);
  const facts = element("div", { class: "facts" }, link, strip(group));
  facts.append(element("span", {}, group.average === null ? "unscored" : `reward ${number(group.average, 3)} ± ${number(group.spread, 2)}`));
  const answers = one ? fitting(one, filters) : [];
  const shown = sum(answers.map((answer) => answer.samples.length));
  facts.append(element("span", {}, `${plural(group.rewards.length, "answer")}, ${group.different} different`));
  if (shown < group.rewards.length) facts.append(element("span", {}, one ? `${shown} shown` : "its file is missing"));
  if (!group.spread && group.average !== null) facts.append(element("span", {}, "all the same reward: nothing to learn"));
  return element("div", { class: "cell" }, facts, element("ol", { class: "answers" }, ...answers.map((answer) => drawAnswer(answer, group, filters.text))));
}

// The mean reward of a prompt by step, in each run that had it more than once.
function course(unit) {
  const series = unit.cells.flatMap((groups, place) =>
    groups.length > 1 ? [{ name: data.runs[place].label, colour: colour(place), steps: groups.map((one) => one.step), values: groups.map((one) => one.average) }] : []);
  return series.length ? [curves("Reward of this prompt", "mean of its answers in a step", series)] : [];
}

// Pictures as the model gets them, small ones enlarged; null where a file is missing.
function pictures(images, where = "of the prompt") {
  const line = element("div", { class: "pictures" });
  images.forEach((source, at) => line.append(source
    ? element("img", { src: source, alt: `picture ${at + 1} ${where}` })
    : element("span", { class: "quiet" }, "a picture whose file is missing")));
  return line;
}

// unit: {prompt, cells: for each run the groups of that prompt, by step}. whole: all steps of it and not the last alone.
async function drawUnit(unit, filters, whole) {
  const columns = unit.cells.map((groups) => (whole ? groups : groups.slice(-1)));
  const texts = await Promise.all(columns.map((groups) => Promise.all(groups.map(textsOf))));
  const asked = [...new Set(texts.flat().filter(Boolean).map((one) => one.prompt))];
  const truth = texts.flat().find((one) => one?.truth)?.truth;
  const steps = Math.max(...unit.cells.map((groups) => groups.length));
  const of = several && filters.run !== "" ? filters.run : "";
  const facts = element("div", { class: "facts" }, element("b", {}, `prompt ${unit.prompt}`));
  if (truth !== undefined) facts.append(element("span", {}, "expected: ", ...marked(truth, filters.text)));
  if (unit.everywhere > steps || (!whole && steps > 1)) facts.append(element("a", { href: address({ run: of, prompt: unit.prompt }) }, `in ${unit.everywhere} steps`));
  else if (steps > 1) facts.append(element("span", {}, `${steps} steps`));
  const head = element("div", { class: "ask" }, facts);
  const images = [...new Set(texts.flat().flatMap((one) => one?.images ?? []))];
  if (images.length) head.append(pictures(images));
  for (const text of asked) head.append(element("pre", { tabindex: 0 }, ...marked(text, filters.text)));
  if (asked.length > 1) head.append(element("p", { class: "quiet" }, "The runs have other prompts under this number."));
  const figures = whole ? course(unit) : [];
  const parts = columns.map((groups, place) => {
    const column = element("div", { class: "column" });
    if (unit.cells.length > 1) {
      const heading = element("h3", {}, data.runs[place].label);
      heading.style.setProperty("--mine", colour(place));
      column.append(heading);
      if (!groups.length) column.append(element("p", { class: "quiet none" }, filters.step === null ? "no such answers" : `not in step ${filters.step}`));
    }
    column.append(...groups.map((group, at) => drawGroup(group, texts[place][at], filters)));
    return column;
  });
  const made = element("article", { class: "group" }, head, ...figures, element("div", { class: "columns" }, ...parts));
  made.shown = () => figures.forEach((one) => one.redraw());
  return made;
}
