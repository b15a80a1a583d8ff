// An answer token by token, in colours of a figure; the figures of one token stand below.
const COLOURINGS = {
  advantage: { name: "advantage", size: (value) => value },
  ratio: { name: "ratio to the policy that began the step", size: (value) => Math.log(value) },
  entropy: { name: "entropy, nats", size: (value) => value },
  clipped: { name: "clipped", size: (value) => value },
};

function tokenView(answer) {
  const { text, sampled, ...figures } = answer.tokens;
  const known = Object.keys(COLOURINGS).filter((name) => figures[name]?.length);
  const sizes = (name) => figures[name].map((value, at) => (sampled[at] && value !== null ? COLOURINGS[name].size(value) : null));
  const differ = (name) => new Set(sizes(name).filter((size) => size !== null)).size > 1;
  const select = element("select", { "aria-label": "colours show" }, ...known.map((name) => element("option", { value: name }, COLOURINGS[name].name)));
  select.value = ["advantage", "entropy"].find((name) => known.includes(name) && differ(name)) ?? known[0];
  const scale = element("span", { class: "scale" }), told = element("p", { class: "told", role: "status" });
  const stream = element("p", { class: "stream", tabindex: 0, "aria-label": "tokens; the arrow keys move between them" });
  const marks = text.map((one, at) => {
    const mark = element("span", sampled[at] ? { class: "token" } : { class: "token context" }, one.replaceAll("\n", "↵\n"));
    mark.addEventListener("pointerover", () => tell(at));
    mark.addEventListener("click", () => tell(at));
    return mark;
  });
  stream.append(...marks);
  if (answer.more_tokens) stream.append(element("span", { class: "context" }, ` … ${plural(answer.more_tokens, "more token")}`));
  let current = -1;

  function tell(at) {
    marks[current]?.classList.remove("current");
    marks[(current = at)].classList.add("current");
    const facts = known.map((name) => `${name} ${name === "clipped" ? (figures[name][at] ? "yes" : "no") : number(figures[name][at], 3)}`);
    const all = sampled[at] ? facts : ["not sampled by the policy: nothing is learnt on it"];
    told.replaceChildren(element("b", {}, `token ${at + 1} of ${text.length} ${JSON.stringify(text[at])}`), ` · ${all.join(" · ")}`);
  }

  function paint() {
    const values = sizes(select.value), most = Math.max(...values.map((size) => Math.abs(size ?? 0))) || 1;
    values.forEach((size, at) => {
      const share = size === null ? 0 : Math.round((70 * Math.abs(size)) / most);
      marks[at].style.background = share ? `color-mix(in oklab, var(${size < 0 ? "--least" : "--most"}) ${share}%, transparent)` : "";
    });
    const shown = figures[select.value].filter((value, at) => sampled[at] && value !== null);
    const [least, largest] = [Math.min(...shown), Math.max(...shown)];
    scale.textContent = shown.length ? (least === largest ? `${number(least, 3)} on all tokens` : `${number(least, 3)} to ${number(largest, 3)}`) : "";
  }

  stream.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    tell(Math.max(0, Math.min(text.length - 1, current + move)));
    event.preventDefault();
  });
  select.addEventListener("input", (event) => {
    event.stopPropagation();
    paint();
  });
  if (known.length) paint();
  told.textContent = "Point at a token, or move with the arrow keys.";
  return element("div", { class: "tokens" }, element("label", {}, "colours show ", select, " ", scale), stream, told);
}
