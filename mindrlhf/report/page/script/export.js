// A figure as a PNG or an SVG, or its values as CSV.
const STYLES = ["fill", "stroke", "strokeWidth", "strokeDasharray", "strokeLinejoin", "opacity", "font", "visibility"];
const SCALE = 2; // pixels of a PNG for each of the page's

function saveButtons(figure, title, file, table) {
  const name = file.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "");
  const about = (kind) => ({ "aria-label": `${title} as ${kind}` });
  return element(
    "span",
    { class: "save" },
    button("PNG", async () => download(`${name}.png`, await png(figure, title)), about("PNG")),
    button("SVG", () => download(`${name}.svg`, new Blob([standalone(figure, title).text], { type: "image/svg+xml" })), about("SVG")),
    button("CSV", () => download(`${name}.csv`, new Blob([csv(table())], { type: "text/csv" })), about("CSV")),
  );
}

function download(name, blob) {
  const link = element("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const csv = (rows) => rows.map((row) => row.map(cell).join(",") + "\n").join("");

function cell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

async function png(figure, title) {
  const { text, size } = standalone(figure, title), image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = element("canvas", { width: SCALE * size.width, height: SCALE * size.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function standalone(figure, title) {
  const picture = figure.querySelector("svg"), { width, height } = picture.viewBox.baseVal;
  const copy = picture.cloneNode(true), page = getComputedStyle(document.body);
  const copies = [copy, ...copy.querySelectorAll("*")];
  // The styles are the page's, and a picture of its own has to bring them along.
  [picture, ...picture.querySelectorAll("*")].forEach((one, place) => {
    const style = getComputedStyle(one);
    for (const name of STYLES) copies[place].style[name] = style[name];
  });
  const written = (x, y, text, weight) =>
    shape("text", { x, y, style: `font:${weight} 13px ${page.fontFamily};fill:${page.color}` }, text);
  const unit = figure.querySelector("figcaption small").textContent;
  const whole = shape("svg", {}, shape("rect", { width: "100%", height: "100%", fill: page.backgroundColor }));
  whole.append(written(10, 22, title, 600), written(10, 40, unit, 400));
  for (const [name, value] of Object.entries({ x: 0, y: 48, width, height })) copy.setAttribute(name, value);
  whole.append(copy);
  let x = 10, y = height + 66;
  for (const entry of figure.querySelectorAll(".legend > span")) {
    const mark = entry.querySelector("i"), text = entry.textContent, room = 30 + 7 * text.length;
    if (x > 10 && x + room > width) [x, y] = [10, y + 20];
    const style = mark && getComputedStyle(mark);
    const fill = mark?.className === "area" ? style?.backgroundColor : style?.borderTopColor;
    if (mark) whole.append(shape("rect", { x, y: y - 10, width: 12, height: 10, rx: 2, fill }));
    whole.append(written(x + (mark ? 17 : 0), y, text, 400));
    x += room;
  }
  const size = { width, height: y + 12, viewBox: `0 0 ${width} ${y + 12}` };
  for (const [name, value] of Object.entries(size)) whole.setAttribute(name, value);
  return { text: new XMLSerializer().serializeToString(whole), size };
}
