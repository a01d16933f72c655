// Blocks by time: held, and what stock vLLM would hold. On the right the same as a position.

import { count } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const TOP = 12, BOTTOM = 18, LEFT = 28, RIGHT = 76;

// `readings`: {at, held, stock, position}, in order; `blockSize`: entries of a block.
export function draw(box, readings, blockSize) {
  const width = Math.max(200, box.clientWidth), height = Math.max(80, box.clientHeight);
  const last = readings.at(-1);
  const most = 1.1 * Math.max(...readings.map((each) => Math.max(each.held, each.stock)));
  const from = readings[0].at, to = Math.max(last.at, from + 0.5);
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  const y = (blocks) => height - BOTTOM - (blocks / most) * (height - TOP - BOTTOM);
  const line = (name) => `M${readings.map((each) => `${x(each.at).toFixed(1)} ${y(each[name]).toFixed(1)}`).join("L")}`;

  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute(
    "aria-label",
    `At position ${count(last.position)} the stream holds ${last.held} blocks; stock vLLM would hold ${last.stock}.`,
  );
  for (const blocks of ticks(most)) {
    svg.append(
      element("path", { class: "grid", d: `M${LEFT} ${y(blocks)}H${width - RIGHT}` }),
      label(LEFT - 4, y(blocks) + 4, "end", blocks),
    );
  }
  svg.append(
    label(LEFT, height - 4, "start", `${from.toFixed(1)} s`),
    label(width - RIGHT, height - 4, "end", `${to.toFixed(1)} s`),
    element("path", { class: "stock", d: line("stock") }),
    element("path", { class: "held", d: line("held") }),
  );
  // The labels of two lines that are close keep a line's height apart.
  const heldY = y(last.held), stockY = y(last.stock);
  const apart = Math.abs(heldY - stockY) < 26 ? (26 - Math.abs(heldY - stockY)) / 2 : 0;
  const down = heldY >= stockY ? apart : -apart;
  svg.append(
    label(width - RIGHT + 5, heldY + down + 4, "start", `held ${last.held}`, "held"),
    label(width - RIGHT + 5, stockY - down, "start", `stock ${last.stock}`, "stock"),
    label(width - RIGHT + 5, stockY - down + 12, "start", `at ${count(last.position)}`, "stock"),
  );
  box.replaceChildren(svg);
}

function ticks(most) {
  const rough = most / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].find((each) => each * power >= rough) * power);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function label(x, y, anchor, text, name = "") {
  const found = element("text", { x, y, "text-anchor": anchor, class: name });
  found.textContent = text;
  return found;
}

function element(name, attributes) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
