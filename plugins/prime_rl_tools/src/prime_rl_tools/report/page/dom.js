"use strict";

// Elements, numbers, differences: what knows nothing of a run.

const $ = (id) => document.getElementById(id);

function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, props, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Small and large numbers have an exponent: 2.07e−4 fits a column that 0.000207 does not.
const number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  const rounded = Number(value.toPrecision(digits)), size = Math.abs(rounded);
  const isPlain = size === 0 || (size >= 0.001 && size < 1e6);
  const text = isPlain ? String(rounded) : rounded.toExponential().replace("+", "");
  return text.replaceAll("-", "−");
};
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
const at = (column, index) => (Array.isArray(column) ? column[index] : column);
const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

const MOST_CELLS = 3e7; // of the table of `difference`: about a tenth of a second

// The places of `after` that are not in a longest common subsequence with `before`, and those of
// `before` that are not. Longer ones than MOST_CELLS allows differ from the first change to the last.
function difference(before, after) {
  let first = 0, a = before.length, b = after.length;
  while (first < a && first < b && before[first] === after[first]) first++;
  while (a > first && b > first && before[a - 1] === after[b - 1]) { a--; b--; }
  const gone = new Set(), fresh = new Set(), rows = a - first, width = b - first + 1;
  if ((rows + 1) * width > MOST_CELLS) {
    for (let i = first; i < a; i++) gone.add(i);
    for (let j = first; j < b; j++) fresh.add(j);
    return { gone, fresh };
  }
  const longest = new Uint16Array((rows + 1) * width); // of before[i..] and after[j..]
  for (let i = rows - 1; i >= 0; i--)
    for (let j = width - 2, here = i * width, below = here + width; j >= 0; j--)
      longest[here + j] = before[first + i] === after[first + j] ? longest[below + j + 1] + 1 : Math.max(longest[below + j], longest[here + j + 1]);
  let i = 0, j = 0;
  while (i < rows || j < width - 1) {
    if (i < rows && j < width - 1 && before[first + i] === after[first + j]) { i++; j++; }
    else if (j < width - 1 && (i === rows || longest[i * width + j + 1] >= longest[(i + 1) * width + j])) fresh.add(first + j++);
    else gone.add(first + i++);
  }
  return { gone, fresh };
}
