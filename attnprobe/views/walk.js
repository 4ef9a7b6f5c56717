// softmax(QKᵀ/√d_k + M)V for one word in one head: every number is computed here, in float64,
// from the query, key and value that the page holds.

const at = {layer: 0, head: 0, word: DATA.word, numbers: false};
const focusable = {tokens: 0, components: 0}; // the cell of each strip that Tab goes to
const shown = {hovered: null, focused: null}; // cells, {name, place}: the later of the two shows
let layers, found;

const say = (name, values = {}) =>
  DATA.messages[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);

// A label within a sentence: it turns no text around it.
const apart = label => `\u2068${label}\u2069`;

function read(number, digits = 4) {
  if (Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number < 0 ? "−∞" : "∞";
  const size = Math.abs(number);
  const text = size && (size < 1e-3 || size >= 1e5)
    ? number.toExponential(digits - 2).replace("+", "")
    : String(+number.toPrecision(digits));
  return text.replaceAll("-", "−");
}

// The same for a calculation: a number that was rounded keeps all of its digits, so that 0.99998
// is no 1 but 1.000.
function full(number) {
  const text = read(number), fixed = number.toPrecision(4);
  const exact = Math.abs(number - fixed) <= 1e-6 * Math.abs(number); // as float32 is
  return exact || /[e∞–]/.test(text) || fixed.includes("e") ? text : fixed.replaceAll("-", "−");
}
const factor = number => (number < 0 ? `(${full(number)})` : full(number));

// The formula

const vector = ({values, shape: [, tokens, size]}, head, token) =>
  values.subarray((head * tokens + token) * size, (head * tokens + token + 1) * size);
const sum = numbers => numbers.reduce((total, one) => total + one, 0);
const dot = (one, other) => one.reduce((total, part, i) => total + part * other[i], 0);
const norm = one => Math.sqrt(dot(one, one));
const largest = numbers =>
  numbers.reduce((most, one) => (Number.isFinite(one) ? Math.max(most, Math.abs(one)) : most), 0);

function walk() {
  const layer = layers[at.layer];
  const token = DATA.words[at.word].tokens.at(-1);
  const places = [...DATA.tokens.keys()];
  const query = vector(layer.query, at.head, token);
  const keys = places.map(place => vector(layer.key, layer.key_of[at.head], place));
  const values = places.map(place => vector(layer.value, layer.key_of[at.head], place));
  const allowed = places.map(place => layer.allowed.values[token * places.length + place] === 1);

  const raw = keys.map(key => dot(query, key));
  const score = raw.map(one => one * layer.scaling);
  const masked = score.map((one, i) => (allowed[i] ? one : -Infinity));
  const most = Math.max(...masked);
  const powers = masked.map(one => Math.exp(one - most));
  const total = sum(powers);
  const weight = powers.map(one => one / total);

  const value_norm = values.map(norm);
  const o = [...values[0].keys()].map(i => sum(values.map((value, j) => weight[j] * value[i])));
  const o_model = [...vector(layer.output, at.head, token)];
  const along = values.map((value, i) => weight[i] * dot(value, o));
  const squared = dot(o, o);
  return {
    layer, token, allowed, values, raw, score, masked, most, total, weight, value_norm, o, o_model,
    along, squared,
    size: query.length,
    query_norm: norm(query),
    key_norm: keys.map(norm),
    brought: weight.map((one, i) => one * value_norm[i]),
    share: along.map(one => one / squared),
    difference: largest(o.map((one, i) => one - o_model[i])),
  };
}

// The strips: a term of the formula, its step, its colours, and the number where they end.

const isRoot = () => Math.abs(found.layer.scaling * Math.sqrt(found.size) - 1) < 1e-6;
const outputHigh = () => Math.max(largest(found.o), largest(found.o_model));
const STRIPS = {
  raw: {
    kind: "tokens", step: 1, term: () => "q·k", colours: "signed", high: () => largest(found.raw),
    note: () => say("raw"),
  },
  score: {
    kind: "tokens", step: 2, term: () => (isRoot() ? "q·k / √d_k" : "q·k · s"), colours: "signed",
    high: () => largest(found.score),
    note: () => say("score", {
      scaling: read(found.layer.scaling) + (isRoot() ? ` = 1/√${found.size}` : ""),
    }),
  },
  masked: {
    kind: "tokens", step: 3, term: () => "+ M", colours: "signed",
    high: () => largest(found.score), note: () => say("masked"),
  },
  weight: {
    kind: "tokens", step: 4, term: () => "a = softmax", colours: "weights", high: () => 1,
    note: () => say("weight", {sum: read(sum(found.weight))}),
  },
  brought: {
    kind: "tokens", step: 5, term: () => "|a·v|", colours: "weights",
    high: () => largest(found.brought), note: () => say("brought"),
  },
  share: {
    kind: "tokens", step: 5, term: () => "(a·v)·o / |o|²", colours: "signed",
    high: () => Math.max(1, largest(found.share)),
    note: () => say("share", {sum: read(sum(found.share))}),
  },
  o: {
    kind: "components", step: 5, term: () => "o = Σ a·v", colours: "signed", high: outputHigh,
    note: () => say("o", {size: found.o.length}),
  },
  o_model: {
    kind: "components", step: 5, term: () => "o_model", colours: "signed", high: outputHigh,
    note: () => say("o_model"),
  },
};
const namesOf = kind => Object.keys(STRIPS).filter(name => STRIPS[name].kind === kind);

// d_k as it is printed.
function printed(term) {
  const [base, below] = term.split("_");
  return below ? [base, make("sub", {textContent: below})] : [base];
}

// Colours

// The colour at 0 to 1 along stops that stand evenly apart; NaN is in the middle.
function blended(stops, share) {
  const place = Math.min(Math.max(Number.isNaN(share) ? 0.5 : share, 0), 1) * (stops.length - 1);
  const start = Math.min(Math.floor(place), stops.length - 2);
  return stops[start].map((low, i) => low + (stops[start + 1][i] - low) * (place - start));
}

// The calculation of one cell

function tokenLines(name, i) {
  const {layer, raw, score, masked, weight, value_norm} = found;
  const cosine = raw[i] / (found.query_norm * found.key_norm[i]);
  const lines = {
    raw: ["raw_how", `q·k = |q| · |k| · cos θ = ${full(found.query_norm)} × `
      + `${full(found.key_norm[i])} × ${factor(cosine)} = ${full(raw[i])}`],
    score: ["score_how", `${full(raw[i])} × ${full(layer.scaling)} = ${full(score[i])}`],
    masked: found.allowed[i]
      ? ["seen_how", `${full(score[i])} + 0 = ${full(masked[i])}`]
      : ["hidden_how", `${full(score[i])} + (−∞) = −∞`],
    weight: ["weight_how", `e^(${full(masked[i])} − ${factor(found.most)}) / `
      + `${read(found.total, 6)} = ${full(weight[i])}`],
    brought: ["brought_how",
      `a·|v| = ${full(weight[i])} × ${full(value_norm[i])} = ${full(found.brought[i])}`],
    share: ["share_how", `(a·v)·o / |o|² = ${full(found.along[i])} / `
      + `${full(found.squared)} = ${full(found.share[i])}`],
  };
  const names = Object.keys(lines);
  return names.slice(0, names.indexOf(name) + 1)
    .map(one => [STRIPS[one].step, say(lines[one][0]), lines[one][1]]);
}

function componentLines(i) {
  const {weight, values, o, o_model} = found;
  const terms = weight.map((one, j) => ({token: j, value: one * values[j][i]}))
    .filter((_, j) => found.allowed[j])
    .sort((one, other) => Math.abs(other.value) - Math.abs(one.value));
  const first = terms.slice(0, 4).map(({token}) =>
    `${full(weight[token])} × ${factor(values[token][i])} (${apart(DATA.tokens[token])})`);
  const rest = terms.slice(4);
  if (rest.length) {
    const value = full(sum(rest.map(one => one.value)));
    first.push(`(${say("others", {count: rest.length, value})})`);
  }
  const difference = full(Math.abs(o[i] - o_model[i]));
  return [
    [5, say("o_how"), `o[${i}] = Σ a·v[${i}] = ${first.join(" + ")} = ${full(o[i])}`],
    [5, say("o_model_how"),
      `${full(o_model[i])}; |${full(o[i])} − ${factor(o_model[i])}| = ${difference}`],
  ];
}

function drawCalculation() {
  const usual = {name: "weight", place: found.weight.indexOf(Math.max(...found.weight))};
  const {name, place: asked} = shown.hovered || shown.focused || usual;
  const place = Math.min(asked, found[name].length - 1); // heads may differ in size by layer
  const strip = STRIPS[name];
  const words = {query: apart(DATA.tokens[found.token]), key: apart(DATA.tokens[place]), at: place};
  const lines = strip.kind === "tokens" ? tokenLines(name, place) : componentLines(place);
  document.getElementById("calculation").replaceChildren(
    make("h2", {textContent: say(strip.kind === "tokens" ? "pair" : "component", words)}),
    make("ol", {}, ...lines.map(([step, how, numbers]) => make("li", {}, badge(step),
      make("span", {className: "how", textContent: how}),
      make("span", {className: "numbers", textContent: numbers})))),
  );
  for (const part of document.querySelectorAll(".formula [data-step]")) {
    part.classList.toggle("lit", +part.dataset.step === strip.step);
  }
  for (const cell of document.querySelectorAll("td.lit")) cell.classList.remove("lit");
  cellAt(name, place)?.classList.add("lit");
}

// What is drawn once

const badge = step => make("b", {className: "badge", textContent: step});

function formula() {
  const part = (step, ...text) => make("span", {dataset: {step}}, badge(step), ...text);
  return make("p", {className: "formula"}, part(4, "softmax"), "(", part(1, "QKᵀ"), " ",
    part(2, "/ √d", make("sub", {textContent: "k"})), " ", part(3, "+ M"), ") ", part(5, "V"));
}

function slider(what, numbers) {
  const input = make("input", {
    id: what, type: "range", min: 0, max: numbers.length - 1, value: 0,
    disabled: numbers.length === 1, oninput: () => go({[what]: +input.value}),
  });
  return make("label", {}, say(what), input, make("output", {htmlFor: what}));
}

function controls() {
  const numbers = make("button", {id: "numbers", type: "button", textContent: say("numbers")});
  numbers.onclick = () => {
    at.numbers = !at.numbers;
    draw();
    revealQuery();
  };
  return make("div", {className: "controls"}, slider("layer", DATA.layers.map(one => one.layer)),
    slider("head", DATA.heads), numbers, themeButton(say("theme"), draw));
}

function sentence() {
  const group = make("p", {id: "sentence", role: "radiogroup", ariaLabel: say("sentence")});
  group.dir = "auto";
  DATA.words.forEach(({label, space}, word) => {
    if (space) group.append(" ");
    group.append(make("button", {
      type: "button", role: "radio", textContent: label, dataset: {word}, onclick: () => go({word}),
    }));
  });
  return group;
}

function rowHead(name) {
  return make("th", {className: "label", scope: "row"}, badge(STRIPS[name].step),
    make("span", {className: "term"}), make("span", {className: "scale"}),
    make("span", {className: "note"}));
}

function grid(kind, label, ...head) {
  const rows = namesOf(kind).map(name => make("tr", {dataset: {name}}, rowHead(name)));
  const table = make("table", {id: kind, role: "grid", ariaLabel: label},
    make("thead", {}, ...head), make("tbody", {}, ...rows));
  return make("div", {className: "scroll"}, table);
}

function tokenGrid() {
  const head = (label, ...cells) =>
    make("tr", {}, make("th", {className: "label", textContent: label}), ...cells);
  const words = DATA.words.map(({label, tokens}, word) => make("th", {
    className: "word", colSpan: tokens.length, textContent: label, dataset: {word},
    onclick: () => go({word}),
  }));
  const tokens = DATA.words.flatMap(({tokens}, word) => tokens.map(token => make("th", {
    className: "token", dataset: {word, token}, onclick: () => go({word}),
  }, make("span", {textContent: DATA.tokens[token]}), make("small", {textContent: token}))));
  return grid("tokens", say("strips"), head(say("words"), ...words), head(say("tokens"), ...tokens));
}

// What changes

function cellAt(name, place) {
  return document.querySelector(`tr[data-name="${name}"]`).cells[place + 1];
}

function drawRow(name) {
  const {colours, high, term, note} = STRIPS[name];
  const stops = DATA.colours[colours][isDark() ? "dark" : "light"];
  const row = document.querySelector(`tr[data-name="${name}"]`);
  const numbers = found[name];
  const end = high() || 1;
  const [termPart, scale, notePart] = [".term", ".scale", ".note"].map(one =>
    row.querySelector(one));
  termPart.replaceChildren(...printed(term()));
  notePart.textContent = note();
  const start = colours === "signed" ? -end : 0;
  const [low, most] = [read(start, 3), read(end, 3)];
  scale.title = say("scale", {low, high: most});
  const gradient = `linear-gradient(to right, ${stops.join(", ")})`;
  scale.replaceChildren(low, make("i", {style: {background: gradient}}), most);

  while (row.cells.length > numbers.length + 1) row.lastChild.remove();
  while (row.cells.length < numbers.length + 1) row.append(make("td", {role: "gridcell"}));
  const parts = stops.map(one => [1, 3, 5].map(i => parseInt(one.slice(i, i + 2), 16)));
  numbers.forEach((number, place) =>
    drawCell(row.cells[place + 1], name, place, blended(parts, (number - start) / (end - start))));
}

function drawCell(cell, name, place, colour) {
  const {kind, term, step} = STRIPS[name];
  const number = found[name][place];
  const hidden = kind === "tokens" && step >= 3 && !found.allowed[place];
  const key = kind === "tokens" ? apart(DATA.tokens[place]) : place;
  cell.dataset.value = number;
  cell.tabIndex = place === Math.min(focusable[kind], found[name].length - 1) ? 0 : -1;
  cell.ariaLabel = say("cell", {term: term(), key, value: read(number)});
  cell.textContent = number === -Infinity ? "−∞" : at.numbers ? read(number, 3) : "";
  cell.classList.toggle("masked", hidden);
  cell.style.background = hidden ? "" : `rgb(${colour.map(Math.round).join(" ")})`;
  cell.style.color = hidden ? "" : inkOn(colour);
}

function drawComponents() {
  const head = document.querySelector("#components thead");
  const places = found.o.map((_, place) => make("th", {className: "token", textContent: place}));
  head.replaceChildren(make("tr", {}, 
    make("th", {className: "label", textContent: say("output")}), ...places));
  document.getElementById("difference").textContent =
    say("difference", {difference: read(found.difference, 3)});
}

function drawHead() {
  const {label, tokens} = DATA.words[at.word];
  const [layer, head] = [DATA.layers[at.layer].layer, DATA.heads[at.head]];
  document.getElementById("headline").textContent =
    say("headline", {layer, head, word: apart(label)});
  const token = apart(DATA.tokens[found.token]);
  document.getElementById("several").textContent = tokens.length === 1
    ? "" : say("several", {word: apart(label), count: tokens.length, token});
  for (const [what, number] of [["layer", layer], ["head", head]]) {
    const input = document.getElementById(what);
    input.value = at[what];
    input.setAttribute("aria-valuetext", number);
    input.nextSibling.textContent = number;
  }
  document.getElementById("numbers").ariaPressed = at.numbers;
  document.body.classList.toggle("with-numbers", at.numbers);
}

function drawWords() {
  for (const one of document.querySelectorAll("[data-word]")) {
    const current = +one.dataset.word === at.word;
    one.classList.toggle("current", current);
    one.classList.toggle("query", +one.dataset.token === found.token);
    if (one.role !== "radio") continue;
    one.ariaChecked = current;
    one.tabIndex = current ? 0 : -1;
  }
}

function draw() {
  found = walk();
  drawHead();
  drawWords();
  drawComponents();
  Object.keys(STRIPS).forEach(drawRow);
  drawCalculation();
}

// Going elsewhere

// To another layer, head or word; false where there is none.
function go(to) {
  const counts = {layer: DATA.layers.length, head: DATA.heads.length, word: DATA.words.length};
  for (const [what, number] of Object.entries(to)) {
    if (number < 0 || number >= counts[what]) return false;
  }
  Object.assign(at, to);
  draw();
  if ("word" in to) revealQuery();
  return true;
}

// Scroll strips sideways, and nothing else, until a column is in sight.
function reveal(column) {
  const box = column.closest(".scroll");
  const [left, right] = [column.offsetLeft - box.querySelector(".label").offsetWidth,
    column.offsetLeft + column.offsetWidth - box.clientWidth];
  box.scrollLeft = Math.max(Math.min(box.scrollLeft, left), right);
}

// The same for the query; where it was out of sight, it comes to the right: it looks to the left.
function revealQuery() {
  const query = document.querySelector("th.token.query");
  const box = query.closest(".scroll");
  const before = box.scrollLeft;
  reveal(query);
  if (box.scrollLeft < before) {
    box.scrollLeft = query.offsetLeft + query.offsetWidth - box.clientWidth;
  }
}

function goWord(step) {
  if (!go({word: at.word + step})) return false;
  if (document.activeElement.role === "radio") {
    document.querySelector("#sentence .current").focus();
  }
  return true;
}

function goCell(cell, step) {
  const next = cell.parentNode.cells[cell.cellIndex + step];
  if (!next || next.tagName !== "TD") return false;
  next.focus();
  return true;
}

function pressed(event) {
  if (event.target.tagName === "INPUT") return;
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const cell = event.target.closest("td");
  const rightToLeft = getComputedStyle(document.getElementById("sentence")).direction === "rtl";
  const sideways = step => (cell ? goCell(cell, step) : goWord(rightToLeft ? -step : step));
  const moves = {
    ArrowLeft: () => sideways(-1), ArrowRight: () => sideways(1),
    ArrowUp: () => go({head: at.head - 1}), ArrowDown: () => go({head: at.head + 1}),
    PageUp: () => go({layer: at.layer - 1}), PageDown: () => go({layer: at.layer + 1}),
  };
  if (moves[event.key]?.()) event.preventDefault();
}

const cellOf = element => {
  const cell = element.closest?.("td");
  return cell && {name: cell.parentNode.dataset.name, place: cell.cellIndex - 1};
};

function listen(main) {
  document.addEventListener("keydown", pressed);
  main.addEventListener("mouseover", event => {
    if (event.target.closest("#calculation")) return; // its numbers may be copied
    shown.hovered = cellOf(event.target);
    drawCalculation();
  });
  main.addEventListener("mouseleave", () => {
    shown.hovered = null;
    drawCalculation();
  });
  main.addEventListener("focusin", event => {
    shown.focused = cellOf(event.target);
    if (shown.focused) {
      const {name, place} = shown.focused;
      shown.hovered = null;
      focusable[STRIPS[name].kind] = place;
      for (const one of namesOf(STRIPS[name].kind)) {
        [...document.querySelectorAll(`tr[data-name="${one}"] td`)]
          .forEach((cell, i) => (cell.tabIndex = i === place ? 0 : -1));
      }
      reveal(event.target);
    }
    drawCalculation();
  });
}

async function start() {
  const masks = await Promise.all(DATA.allowed.map(unpack));
  layers = await Promise.all(DATA.layers.map(async layer => {
    const names = ["query", "key", "value", "output"];
    const arrays = await Promise.all(names.map(name => unpack(layer[name])));
    return {...layer, ...Object.fromEntries(names.map((name, i) => [name, arrays[i]])),
      allowed: masks[layer.allowed]};
  }));
  const main = document.getElementById("walk");
  main.append(
    make("header", {}, make("h1", {textContent: say("title")}),
      make("p", {textContent: say("note", {model: DATA.model || say("model"), dtype: DATA.dtype})})),
    formula(), controls(), make("p", {className: "keys", textContent: say("keys")}), sentence(),
    make("div", {className: "about"}, make("h2", {id: "headline"}), make("p", {id: "several"})),
    tokenGrid(), grid("components", say("output")), make("p", {id: "difference"}),
    make("section", {id: "calculation", ariaLive: "polite"}),
  );
  draw();
  revealQuery();
  listen(main);
}

start().then(sayReady);
