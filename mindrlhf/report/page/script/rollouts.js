// The answers section: filters, order, and the cards that they leave.
const UNITS_AT_ONCE = 8;
const SIDE_BY_SIDE = ""; // the value of the field `run`
const form = document.querySelector("#rollouts .filters");
let unitsShown = UNITS_AT_ONCE, drawing = 0;

const ORDERS = {
  spread: ["widest spread first", (unit) => unit.spread],
  difference: ["largest difference first", (unit) => unit.difference],
  worst: ["lowest reward first", (unit) => -(unit.average ?? Infinity)],
  best: ["highest reward first", (unit) => unit.average ?? -Infinity],
  latest: ["latest step first", (unit) => unit.step],
  earliest: ["earliest step first", (unit) => -unit.step],
};

function currentFilters() {
  const field = (name) => form.elements[name].value;
  const whole = (name) => (field(name) === "" ? null : Number(field(name)));
  return {
    run: several ? field("run") : "0", step: whole("step"), prompt: whole("prompt"), low: whole("low"), high: whole("high"),
    text: field("text").toLowerCase(), order: field("order"),
  };
}

// What one card shows: a prompt of a step; or of all steps, where one is asked for; or of all runs.
function units(groups, filters) {
  const apart = filters.run !== SIDE_BY_SIDE, runs = apart ? [Number(filters.run)] : data.runs.map((_, place) => place);
  const key = apart && filters.prompt === null ? (group) => `${group.step} ${group.prompt}` : (group) => group.prompt;
  return [...grouped(groups, key).values()].map((members) => {
    const cells = data.runs.map((_, place) => members.filter((group) => group.run === place));
    const last = cells.map((some) => some.at(-1)).filter(Boolean), means = last.map((group) => group.average ?? 0);
    return {
      prompt: members[0].prompt,
      cells: runs.map((place) => cells[place]),
      everywhere: Math.max(...runs.map((place) => stepsOf[place].get(members[0].prompt) ?? 0)),
      spread: Math.max(...last.map((group) => group.spread)),
      average: mean(means),
      difference: means.length > 1 ? Math.max(...means) - Math.min(...means) : -1,
      step: Math.max(...last.map((group) => group.step)),
    };
  });
}
// How many steps had each prompt.
const stepsOf = groupsOf.map((groups) => {
  const counts = new Map();
  for (const group of groups) counts.set(group.prompt, (counts.get(group.prompt) ?? 0) + 1);
  return counts;
});

async function drawRollouts() {
  const mine = ++drawing, filters = currentFilters();
  document.body.dataset.busy = "";
  const runs = filters.run === SIDE_BY_SIDE ? data.runs.map((_, place) => place) : [Number(filters.run)];
  let groups = runs.flatMap((place) => groupsOf[place]).filter((group) =>
    (filters.step === null || group.step === filters.step) && (filters.prompt === null || group.prompt === filters.prompt));
  groups = groups.map((group) => ({ ...group, count: group.rewards.filter((reward) => within(reward, filters)).length })).filter((group) => group.count);
  if (filters.text) {
    groups = await searched(groups, filters, (share) => {
      if (mine === drawing) byId("count").textContent = `searching all answers: ${Math.round(100 * share)}%`;
      return mine === drawing;
    });
  }
  if (mine !== drawing) return;
  const found = units(groups, filters), worth = (ORDERS[filters.order] ?? ORDERS.spread)[1];
  const present = (unit) => unit.cells.filter((groups) => groups.length).length; // prompts that all runs have come first
  found.sort((a, b) => present(b) - present(a) || worth(b) - worth(a) || b.step - a.step);
  const cards = await Promise.all(found.slice(0, unitsShown).map((unit) => drawUnit(unit, filters, filters.prompt !== null)));
  if (mine !== drawing) return;
  byId("groups").replaceChildren(...cards);
  cards.forEach((card) => card.shown());
  byId("more").hidden = found.length <= unitsShown;
  byId("count").textContent = counted(groups, runs, filters);
  delete document.body.dataset.busy;
}

function counted(groups, runs, filters) {
  const answers = runs.map((place) => data.runs[place].answers), all = sum(answers.map((one) => one.all_steps));
  const tuned = runs.every((place) => Object.keys(data.runs[place].settings).some((name) => name.startsWith("sft.")));
  if (!all) return tuned ? "Fine-tuning draws no answers." : "No answers were kept: set trainer.save_rollouts=True to read them here.";
  const kept = sum(answers.map((one) => one.steps.length));
  const limited = kept < all ? `; ${kept.toLocaleString("en")} of ${plural(all, "step")} are in this report` : "";
  const old = !("DecompressionStream" in window);
  const missing = old ? " This browser cannot unpack them; take one of 2023 or later." : MISSING.size ? ` Files of the folder ${data.folder} are missing: bring it along with this page.` : "";
  if (!groups.length) {
    const [first, last] = [answers[0].steps[0], answers[0].steps.at(-1)];
    return filters.step !== null ? `No such answers in step ${filters.step}; there are steps ${first} to ${last}.${missing}` : `No such answers.${missing}`;
  }
  const prompts = new Set(groups.map((group) => group.prompt)).size;
  const places = new Set(groups.map((group) => `${group.run} ${group.step}`)).size;
  return `${plural(sum(groups.map((group) => group.count)), "answer")} to ${plural(prompts, "prompt")} in ${plural(places, "step")}${limited}.${missing}`;
}

function openRollouts() {
  fill(form.elements.run, [...(several ? [[SIDE_BY_SIDE, "side by side"]] : []), ...data.runs.map((run, place) => [place, run.label])]);
  form.elements.run.parentElement.hidden = !several;
  const orders = Object.entries(ORDERS).filter(([name]) => several || name !== "difference");
  fill(form.elements.order, orders.map(([name, [text]]) => [name, text]));
  form.hidden = !data.runs.some((run) => run.answers.all_steps);
  form.addEventListener("input", () => {
    unitsShown = UNITS_AT_ONCE;
    drawRollouts();
  });
  byId("more").addEventListener("click", () => {
    unitsShown += UNITS_AT_ONCE;
    drawRollouts();
  });
}
