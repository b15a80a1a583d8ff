// Answers of all runs: the index of groups, and their texts in packed chunks, unpacked when they are needed.
const UNPACKED_AT_ONCE = 64; // chunks that stay in memory
const unpacked = new Map(), awaited = new Map();
const MISSING = new Set(); // chunks whose file cannot be loaded

// Files of a large report call this with their content.
window.reportChunk = (name, content) => awaited.get(name)?.(content);

function packed(name) {
  const inside = byId(`chunk-${name}`);
  if (inside) return Promise.resolve(inside.textContent);
  return new Promise((done, failed) => {
    awaited.set(name, done);
    const script = element("script", { src: `${data.folder}/${name}.js` });
    script.onerror = () => failed(new Error(name));
    document.head.append(script);
  });
}

async function unpack(content) {
  const letters = atob(content), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// The groups of a chunk; none where its file is missing.
function chunk(name) {
  const found = unpacked.get(name) ?? packed(name).then(unpack).catch(() => {
    MISSING.add(name);
    return null;
  });
  unpacked.delete(name);
  unpacked.set(name, found);
  if (unpacked.size > UNPACKED_AT_ONCE) unpacked.delete(unpacked.keys().next().value);
  return found;
}

function indexed(run, place) {
  const { step = [], prompt, chunk: chunks, different, rewards } = run.answers.index;
  let before = -1, at = 0;
  return step.map((one, index) => {
    at = chunks[index] === before ? at + 1 : 0;
    before = chunks[index];
    const scored = rewards[index].filter((reward) => reward !== null);
    const average = mean(scored);
    const spread = scored.length ? Math.sqrt(mean(scored.map((reward) => (reward - average) ** 2))) : 0;
    return {
      run: place, step: one, prompt: prompt[index], chunk: run.answers.chunks[before], at, different: different[index],
      rewards: rewards[index], average, spread,
    };
  });
}
const groupsOf = data.runs.map(indexed);

const textsOf = async (group) => (await chunk(group.chunk))?.[group.at] ?? null;

// Rewards of a run, least and most, by which answers are good or bad.
const EXTREMES = groupsOf.map((groups) => {
  let least = Infinity, most = -Infinity;
  for (const { rewards } of groups)
    for (const reward of rewards)
      if (reward !== null) [least, most] = [Math.min(least, reward), Math.max(most, reward)];
  return { least, most };
});

const within = (reward, { low, high }) =>
  reward === null ? low === null && high === null : reward >= (low ?? -Infinity) && reward <= (high ?? Infinity);

// Answers to a prompt that fit the filters: all where the text is in the prompt.
function fitting(one, filters) {
  const asked = `${one.prompt}\n${one.truth ?? ""}`.toLowerCase().includes(filters.text);
  return one.answers.filter((answer) => within(answer.reward, filters) && (asked || answer.text.toLowerCase().includes(filters.text)));
}

// The groups with answers that have the text, chunk after chunk; `told(share)` says how far it is and may end it.
async function searched(groups, filters, told) {
  const found = [], byChunk = grouped(groups, (group) => group.chunk);
  let done = 0;
  const names = [...byChunk.keys()];
  for (const [name, members] of byChunk) {
    if (names[done + 1]) chunk(names[done + 1]); // is unpacked meanwhile
    const texts = await chunk(name);
    for (const group of members) {
      const count = texts ? sum(fitting(texts[group.at], filters).map((answer) => answer.samples.length)) : 0;
      if (count) found.push({ ...group, count });
    }
    if (!told(++done / byChunk.size)) return null;
  }
  return found;
}

function grouped(items, key) {
  const made = new Map();
  for (const item of items) {
    if (!made.has(key(item))) made.set(key(item), []);
    made.get(key(item)).push(item);
  }
  return made;
}
